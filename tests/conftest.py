"""What every test can rely on."""

import signal

# Whoever starts tests in the background of a shell script starts them, and all processes of theirs, deaf to Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
