package gateway_test

import (
	"crypto/sha1"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

// nodeClient uses fetch of Node, and package ws of npm if NODE_PATH leads to it.
const nodeClient = `
const [port, host] = process.argv.slice(1);
const http = require('node:http');
http.get({port, host: '127.0.0.1', path: '/f', headers: {host}}, async r => {
  let s = ''; for await (const c of r) s += c;
  console.log('http', r.statusCode, s);
  const f = await fetch('http://127.0.0.1:' + port + '/f', {method: 'POST', body: 'b', headers: {'drowse-sandbox': 'n', 'drowse-port': '80'}});
  console.log('fetch', f.status, await f.text()); // its host is an address: no route
  let WS; try { WS = require('ws'); } catch { console.log('no ws'); return; }
  const c = new WS('ws://127.0.0.1:' + port + '/ws', {headers: {host}});
  c.on('open', () => c.send('hello'));
  c.on('message', m => { console.log('ws', m.toString()); c.terminate(); });
  c.on('error', e => console.log('ws error', e.message));
});`

func TestGateway_unmodified_clients(t *testing.T) {
	w := begin(t, nil)
	w.create("n", nil, spec.Idle{})
	w.serves("n", 80, func(rw http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/ws" {
			body, _ := io.ReadAll(r.Body)
			fmt.Fprintf(rw, "%s %s %s", r.Method, r.Proto, body)
			return
		}
		sum := sha1.Sum([]byte(r.Header.Get("Sec-WebSocket-Key") + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
		c, b, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer c.Close()
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: %s\r\n\r\n", base64.StdEncoding.EncodeToString(sum[:]))
		// A frame of a client: fin and text, mask and length, mask, text (RFC 6455, 5.2).
		f := make([]byte, 11)
		if _, err := io.ReadFull(b, f); err != nil {
			return
		}
		for i := range f[6:] {
			f[6+i] ^= f[2+i%4]
		}
		_, _ = c.Write(append([]byte{0x81, 5}, f[6:]...))
		_, _ = io.Copy(io.Discard, b)
	})
	host := "80-n." + domain
	_, port, err := net.SplitHostPort(w.addr)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		argv []string
		want string
	}{
		{[]string{"curl", "-sS", "--http1.1", "-H", "Host: " + host, "-d", "b", "http://" + w.addr + "/"}, "POST HTTP/1.1 b"},
		{[]string{"curl", "-sS", "--http2-prior-knowledge", "-H", "Host: " + host, "-d", "b", "-w", " %{http_version}", "http://" + w.addr + "/"}, "POST HTTP/1.1 b 2"},
		{[]string{"curl", "-sS", "--proxy", w.addr, "-d", "b", "http://" + host + "/"}, "POST HTTP/1.1 b"},
		{[]string{"node", "-e", nodeClient, port, host}, "http 200 GET HTTP/1.1 \nfetch 400"},
	} {
		t.Run(strings.TrimSpace(c.argv[0]+" "+strings.TrimPrefix(c.argv[min(2, len(c.argv)-1)], nodeClient)), func(t *testing.T) {
			w.sleep("n")
			cmd := exec.CommandContext(t.Context(), c.argv[0], c.argv[1:]...)
			cmd.Env = append(os.Environ(), "no_proxy=")
			out, err := cmd.CombinedOutput()
			if errors.Is(err, exec.ErrNotFound) {
				t.Skip(c.argv[0], "is not installed")
			}
			if err != nil || !strings.HasPrefix(string(out), c.want) {
				t.Errorf("%s: %v", out, err)
			}
			if c.argv[0] == "node" && !strings.Contains(string(out), "no ws") && !strings.Contains(string(out), "ws hello") {
				t.Errorf("package ws: %s", out)
			}
			t.Log(string(out))
		})
	}
}
