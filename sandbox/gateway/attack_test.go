package gateway_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/gateway"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// notes are what guests have seen.
type notes struct {
	mu   sync.Mutex
	text []string
}

func (n *notes) add(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.text = append(n.text, fmt.Sprintf(format, args...))
}

// take returns them, and forgets them.
func (n *notes) take() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	defer func() { n.text = nil }()
	return strings.Join(n.text, "; ")
}

// judged makes sandbox a, whose ports are open, and sandbox closed, and notes the requests that they see.
func (w *world) judged() *notes {
	var seen notes
	for _, name := range []string{"a", "closed"} {
		w.create(name, &spec.Gateway{AllPublic: name == "a"}, spec.Idle{})
		w.serves(name, 80, func(rw http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				return // what has no end is no request
			}
			text := fmt.Sprintf("%s %s %s %s %q", name, r.Method, r.RequestURI, r.Host, body)
			for _, h := range []string{"Cookie", "Drowse-Token", "Drowse_token", "Upgrade", "X-Forwarded-For", "X_forwarded_for", "X_real-Ip", "X-Odd"} {
				for _, v := range r.Header.Values(h) {
					text += " " + h + "=" + v
				}
			}
			for h, v := range r.Trailer {
				text += fmt.Sprint(" trailer ", h, "=", v)
			}
			seen.add("%s", text)
		})
	}
	return &seen
}

// A request that a client sends in parts that two readers could take for different ones has one reading, or none.
func TestGateway_smuggling_by_lines_chunks_and_targets(t *testing.T) {
	w := begin(t, nil)
	seen := w.judged()
	a, closed := "80-a."+domain, "80-closed."+domain
	host, end := "Host: "+a+"\r\n", "Connection: close\r\n\r\n"
	from := " X-Forwarded-For=127.0.0.1"
	chunked := "POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked\r\n" + end
	behind := "GET /evil HTTP/1.1\r\nHost: " + closed + "\r\n" + end
	for name, c := range map[string]struct {
		say    string
		status string // of all answers
		seen   string
	}{
		"lines that end with LF":              {"GET /n HTTP/1.1\nHost: " + a + "\nConnection: close\n\n", "200", `a GET /n ` + a + ` ""` + from},
		"a CR in a value":                     {"GET / HTTP/1.1\r\n" + host + "X-Odd: a\rX: b\r\n" + end, "400", ""},
		"a NUL in a value":                    {"GET / HTTP/1.1\r\n" + host + "X-Odd: a\x00b\r\n" + end, "400", ""},
		"a line without a colon":              {"GET / HTTP/1.1\r\n" + host + "X-Odd\r\n" + end, "400", ""},
		"a first line that begins with space": {"GET / HTTP/1.1\r\n X-Odd: a\r\n" + host + end, "400", ""},
		"a TE with a vertical tab":            {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: \vchunked\r\n" + end + "0\r\n\r\n", "400", ""},
		"a list of TE":                        {"POST / HTTP/1.1\r\n" + host + "Transfer-Encoding: chunked, identity\r\n" + end + "0\r\n\r\n", "501", ""},
		"TE in HTTP/1.0 does not count":       {"POST / HTTP/1.0\r\n" + host + "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n" + end + "0\r\n\r\n", "200", `a POST / ` + a + ` "0\r\n\r\n"` + from},
		"a body of a GET":                     {"GET / HTTP/1.1\r\n" + host + "Content-Length: 4\r\n" + end + "body", "200", `a GET / ` + a + ` "body"` + from},
		"a chunk's size ends with LF":         {chunked + "3\nabc\r\n0\r\n\r\n", "400", ""},
		"a chunk's size in C":                 {chunked + "0x3\r\nabc\r\n0\r\n\r\n", "400", ""},
		"a chunk's size too large":            {chunked + "ffffffffffffffff3\r\nabc\r\n0\r\n\r\n", "400", ""},
		"a chunk longer than said":            {chunked + "3\r\nabcd\r\n0\r\n\r\n", "400", ""},
		"a chunk's extension is dropped":      {chunked + "3;x=\"\r\nabc\r\n0\r\n\r\n", "200", `a POST / ` + a + ` "abc"` + from},
		"an extension without end":            {chunked + "3;" + strings.Repeat("x", 20<<10) + "\r\nabc\r\n0\r\n\r\n", "400", ""},
		"trailers stay here": {
			"POST / HTTP/1.1\r\n" + host + "Trailer: X-Forwarded-For, Drowse-Token, X-Odd\r\nTransfer-Encoding: chunked\r\n" + end + "0\r\nX-Forwarded-For: 9.9.9.9\r\nDrowse-Token: t\r\nX-Odd: 1\r\n\r\n",
			"200", `a POST / ` + a + ` ""` + from,
		},
		"each of two requests is judged":        {"GET /1 HTTP/1.1\r\n" + host + "\r\n" + behind, "200 401", `a GET /1 ` + a + ` ""` + from},
		"also after a refused upgrade":          {"GET /2 HTTP/1.1\r\n" + host + "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 7\r\n\r\n" + behind, "200 401", `a GET /2 ` + a + ` "" Upgrade=websocket` + from},
		"two upgrades are the first":            {"GET / HTTP/1.1\r\n" + host + "Connection: upgrade, close\r\nUpgrade: websocket\r\nUpgrade: h2c\r\n\r\n", "200", `a GET / ` + a + ` "" Upgrade=websocket` + from},
		"a list of upgrades is none":            {"GET / HTTP/1.1\r\n" + host + "Connection: upgrade, close\r\nUpgrade: websocket, h2c\r\n\r\n", "200", `a GET / ` + a + ` ""` + from},
		"Connection cannot drop what counts":    {"POST / HTTP/1.1\r\n" + host + "Content-Length: 4\r\nConnection: close, Content-Length, Host, X-Forwarded-For, X-Odd\r\nX-Odd: 1\r\n\r\nbody", "200", `a POST / ` + a + ` "body"` + from},
		"names that a CGI takes for the same":   {"GET / HTTP/1.1\r\n" + host + "X_Forwarded_For: 9.9.9.9\r\nX_Real-IP: 9.9.9.9\r\nDrowse_Token: t\r\nX-Odd: 1\r\n" + end, "200", `a GET / ` + a + ` ""` + from + ` X-Odd=1`},
		"two slashes are a path":                {"GET //" + closed + "/x HTTP/1.1\r\n" + host + end, "200", `a GET //` + closed + `/x ` + a + ` ""` + from},
		"a target of another scheme":            {"GET ftp://" + closed + "/x HTTP/1.1\r\n" + host + end, "401", ""},
		"a target that is no path":              {"GET http:" + closed + "/x HTTP/1.1\r\n" + host + end, "400", ""},
		"a target with an escaped line":         {"GET /%0d%0aHost:%20" + closed + " HTTP/1.1\r\n" + host + end, "200", `a GET /%0d%0aHost:%20` + closed + ` ` + a + ` ""` + from},
		"a target with a space":                 {"GET /a b HTTP/1.1\r\n" + host + end, "400", ""},
		"no version":                            {"GET /\r\n" + host + end, "400", ""},
		"a method that is none":                 {"GE(T / HTTP/1.1\r\n" + host + end, "400", ""},
		"a token in another case is the same":   {"GET / HTTP/1.1\r\nHost: " + closed + "\r\ndrowse-TOKEN: x\r\n" + end, "403", ""},
		"a refused body is not another request": {"POST / HTTP/1.1\r\nHost: " + closed + "\r\nContent-Length: 500\r\n\r\n" + "GET / HTTP/1.1\r\n" + host + "\r\n", "401", ""},
	} {
		_, r := w.say(c.say)
		var statuses []string
		for {
			a, err := http.ReadResponse(r, nil)
			if err != nil {
				if len(statuses) == 0 {
					t.Errorf("%s: %v", name, err)
				}
				break
			}
			statuses = append(statuses, fmt.Sprint(a.StatusCode))
			if _, err := io.Copy(io.Discard, a.Body); err != nil || a.Close {
				break
			}
		}
		if got := strings.Join(statuses, " "); got != c.status {
			t.Errorf("%s: answered %s, want %s", name, got, c.status)
		}
		until(t, "the request has ended", func() bool { return w.gate.Stats().Open == 0 })
		if got := seen.take(); got != c.seen {
			t.Errorf("%s: seen\n%s\nwant\n%s", name, got, c.seen)
		}
	}
}

// h2 is an HTTP/2 client that sends what it is told.
type h2 struct {
	t    *testing.T
	c    net.Conn
	f    *http2.Framer
	text bytes.Buffer
	enc  *hpack.Encoder
}

func (w *world) h2(t *testing.T) *h2 {
	t.Helper()
	c, err := net.Dial("tcp", w.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	x := &h2{t: t, c: c, f: http2.NewFramer(c, c)}
	x.enc = hpack.NewEncoder(&x.text)
	x.f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	if err := x.f.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	return x
}

// block encodes fields: "name value", in order.
func (x *h2) block(fields ...string) []byte {
	x.text.Reset()
	for _, f := range fields {
		name, value, _ := strings.Cut(f, " ")
		if err := x.enc.WriteField(hpack.HeaderField{Name: name, Value: value}); err != nil {
			x.t.Fatal(err)
		}
	}
	return bytes.Clone(x.text.Bytes())
}

// ended waits for the end of a stream: the status, or "reset" or "goaway" with the code.
func (x *h2) ended(stream uint32) (how string) {
	_ = x.c.SetReadDeadline(time.Now().Add(time.Minute))
	for {
		f, err := x.f.ReadFrame()
		if err != nil {
			return strings.TrimSpace(how + " cut")
		}
		switch f := f.(type) {
		case *http2.GoAwayFrame:
			return strings.TrimSpace(how + " goaway " + f.ErrCode.String())
		case *http2.RSTStreamFrame:
			if f.StreamID == stream {
				return strings.TrimSpace(how + " reset " + f.ErrCode.String())
			}
		case *http2.MetaHeadersFrame:
			if f.StreamID != stream {
				continue
			}
			if how = f.PseudoValue("status"); f.StreamEnded() {
				return how
			}
		case *http2.DataFrame:
			if f.StreamID == stream && f.StreamEnded() {
				return how
			}
		}
	}
}

// What HTTP/2 can say and HTTP/1.1 cannot, must not become two requests, or another request, of HTTP/1.1.
func TestGateway_smuggling_from_HTTP2_to_HTTP1(t *testing.T) {
	w := begin(t, nil)
	seen := w.judged()
	a, closed := "80-a."+domain, "80-closed."+domain
	get := []string{":method GET", ":scheme http", ":path /"}
	from := " X-Forwarded-For=127.0.0.1"
	for name, c := range map[string]struct {
		fields []string
		body   string
		want   string
		seen   string
	}{
		"a plain one":                    {append(get, ":authority "+a), "", "200", `a GET / ` + a + ` ""` + from},
		"host alone counts":              {append(get, "host "+a), "", "200", `a GET / ` + a + ` ""` + from},
		"the authority counts":           {append(get, ":authority "+closed, "host "+a), "", "401", ""},
		"and the other way about":        {append(get, ":authority "+a, "host "+closed), "", "200", `a GET / ` + a + ` ""` + from},
		"two authorities":                {append(get, ":authority "+a, ":authority "+closed), "", "reset PROTOCOL_ERROR", ""},
		"an authority with a user":       {append(get, ":authority "+closed+"@"+a), "", "reset PROTOCOL_ERROR", ""},
		"an authority with a path":       {append(get, ":authority "+a+"/x"), "", "400", ""},
		"lines in the path":              {[]string{":method GET", ":scheme http", ":path / HTTP/1.1\r\nHost: " + closed + "\r\n\r\nGET /", ":authority " + a}, "", "reset PROTOCOL_ERROR", ""},
		"a space in the path":            {[]string{":method GET", ":scheme http", ":path /x HTTP/1.1", ":authority " + a}, "", "200", `a GET /x%20HTTP/1.1 ` + a + ` ""` + from},
		"a path that is a URL":           {[]string{":method GET", ":scheme http", ":path http://" + closed + "/", ":authority " + a}, "", "200", `a GET / ` + a + ` ""` + from},
		"no path":                        {[]string{":method GET", ":scheme http", ":path ", ":authority " + a}, "", "reset PROTOCOL_ERROR", ""},
		"lines in a value":               {append(get, ":authority "+a, "x-odd a\r\nhost: "+closed), "", "reset PROTOCOL_ERROR", ""},
		"lines in a name":                {append(get, ":authority "+a, "x-odd:\r\nhost x"), "", "reset PROTOCOL_ERROR", ""},
		"lines in the method":            {[]string{":method GET / HTTP/1.1\r\nHost: x\r\n\r\nGET", ":scheme http", ":path /", ":authority " + a}, "", "reset PROTOCOL_ERROR", ""},
		"a space in the method":          {[]string{":method GET /x", ":scheme http", ":path /", ":authority " + a}, "", "502", ""},
		"a scheme with a host":           {[]string{":method GET", ":scheme http://" + closed + "/?", ":path /", ":authority " + a}, "", "reset PROTOCOL_ERROR", ""},
		"transfer-encoding":              {append(get, ":authority "+a, "transfer-encoding chunked"), "", "400", ""},
		"connection":                     {append(get, ":authority "+a, "connection x-forwarded-for"), "", "400", ""},
		"upgrade":                        {append(get, ":authority "+a, "upgrade websocket"), "", "400", ""},
		"a capital letter":               {append(get, ":authority "+a, "X-Odd 1"), "", "reset PROTOCOL_ERROR", ""},
		"a pseudo-header after a header": {append(get, "x-odd 1", ":authority "+a), "", "reset PROTOCOL_ERROR", ""},
		"more than the length":           {append(get, ":authority "+a, "content-length 1"), "GET /evil", "reset PROTOCOL_ERROR", ""},
		"less than the length":           {append(get, ":authority "+a, "content-length 99"), "GET /evil", "400", ""},
		"two lengths":                    {append(get, ":authority "+a, "content-length 3", "content-length 9"), "GET /evil", "reset PROTOCOL_ERROR", ""},
		"CONNECT":                        {[]string{":method CONNECT", ":authority " + a}, "", "400", ""},
		"extended CONNECT":               {[]string{":method CONNECT", ":protocol websocket", ":scheme http", ":path /", ":authority " + a}, "", "reset PROTOCOL_ERROR", ""},
		"cookies in crumbs are one":      {append(get, ":authority "+a, "cookie a=1", "cookie b=2"), "", "200", `a GET / ` + a + ` "" Cookie=a=1; b=2` + from},
		"no more of the client's words":  {append(get, ":authority "+a, "x-forwarded-for 9.9.9.9", "x_forwarded_for 9.9.9.9", "drowse-token t"), "", "200", `a GET / ` + a + ` ""` + from},
	} {
		x := w.h2(t)
		if err := x.f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: x.block(c.fields...), EndHeaders: true, EndStream: c.body == ""}); err != nil {
			t.Fatal(err)
		}
		if c.body != "" {
			if err := x.f.WriteData(1, true, []byte(c.body)); err != nil {
				t.Fatal(err)
			}
		}
		if got := x.ended(1); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		x.c.Close()
		until(t, "the request has ended", func() bool { return w.gate.Stats().Open == 0 })
		if got := seen.take(); got != c.seen {
			t.Errorf("%s: seen\n%s\nwant\n%s", name, got, c.seen)
		}
	}
}

var _ = bufio.NewReader
var _ context.Context
var _ tls.Config
var _ = errors.Is
var _ sandbox.Spec
var _ gateway.Route
