"""Isolated runs of untrusted programs, with limits on everything they can use."""

from wootz.post_training.sandbox.limits import SandboxLimits
from wootz.post_training.sandbox.result import Outcome, SandboxResult, SandboxUnavailable
from wootz.post_training.sandbox.sandbox import Sandbox

__all__ = ["Outcome", "Sandbox", "SandboxLimits", "SandboxResult", "SandboxUnavailable"]
