# Keeps one connection to the web server, and says by which port of its own it goes.
import http.client, sys
from lines import serve

c = http.client.HTTPConnection('127.0.0.1', int(sys.argv[1]))
c.auto_open = 0  # never a second one
c.connect()
mine = c.sock.getsockname()[1]


def answer(_):
    try:
        c.request('GET', '/')
        return '%d %s' % (mine, c.getresponse().read().decode().strip())
    except Exception as e:
        return 'broken: %r' % e


serve(int(sys.argv[2]), answer)
