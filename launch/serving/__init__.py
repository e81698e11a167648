"""The parts of the HTTP server that wootz.launch.serve starts."""
