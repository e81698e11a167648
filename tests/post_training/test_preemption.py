import os
import signal

import pytest

from wootz.post_training import preemption


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_until_the_run_looks(number):
  """LA-2: nothing is interrupted at the signal; the first check after it raises, naming the signal."""
  with preemption.StopSignal() as stop:
    stop.check()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing
    assert stop.received == signal.Signals(number).name
    for _ in range(2):
      with pytest.raises(preemption.Preempted, match=signal.Signals(number).name):
        stop.check()


def test_handlers_are_put_back():
  """Also where the body raises."""
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with pytest.raises(ValueError, match="inside"), preemption.StopSignal():
    assert signal.getsignal(signal.SIGTERM) != before[0]
    raise ValueError("inside")
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_the_exit_status_says_try_again():
  assert preemption.EXIT_PREEMPTED == os.EX_TEMPFAIL
