# Holds a module in memory, and counts how often it was asked.
import os, sys
import drowse_probe
from lines import serve

n = 0


def answer(_):
    global n
    n += 1
    return '%d %s %d' % (os.getpid(), drowse_probe.version(), n)


serve(int(sys.argv[1]), answer)
