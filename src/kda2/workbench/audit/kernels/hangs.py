"""Never returns, and does not mind being asked to end.

Seen in the field as hangs on empty sequences (FlashKDA).
"""

import signal
import time


def run(**inputs):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1.0)
