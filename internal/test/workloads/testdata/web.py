# A web server of HTTP/1.1 that counts its requests, for everybody who reaches the guest.
import http.server, os, sys

n = 0


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def do_GET(self):
        global n
        n += 1
        body = ('%d %d\n' % (os.getpid(), n)).encode()
        self.send_response(200)
        self.send_header('Content-Length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

    def address_string(self):
        return self.client_address[0]


http.server.ThreadingHTTPServer(('', int(sys.argv[1])), Handler).serve_forever()
