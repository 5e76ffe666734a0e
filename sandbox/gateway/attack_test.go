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

// What a server in a guest says reaches its own client as one answer, or as an error; and it holds nothing that its
// client does not hold as well.
func TestGateway_survives_servers_that_split_answers_or_never_end_them(t *testing.T) {
	w := begin(t, nil)
	w.create("a", nil, spec.Idle{})
	left := make(chan struct{}, 16) // the gateway has let go of a server that waits
	for i, s := range []struct {
		name, says string // before anything else
		want       string // status, header X-Odd and body; "" is that the client has to leave
	}{
		{"a CR in a value", "HTTP/1.1 200 OK\r\nX-Odd: a\rX: b\r\nContent-Length: 2\r\n\r\nok", "502"},
		{"a NUL in a value", "HTTP/1.1 200 OK\r\nX-Odd: a\x00\r\nContent-Length: 2\r\n\r\nok", "502"},
		{"a folded line is one", "HTTP/1.1 200 OK\r\nX-Odd: a\r\n b\r\nContent-Length: 2\r\n\r\nok", "200 a b ok"},
		{"lines that end with LF", "HTTP/1.1 200 OK\nX-Odd: a\nContent-Length: 2\n\nok", "200 a ok"},
		{"a space before the colon is dropped", "HTTP/1.1 200 OK\r\nX-Odd : 1\r\nTransfer-Encoding : chunked\r\nContent-Length: 2\r\n\r\nok", "200  ok"},
		{"a length and chunks", "HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", "200  ok"},
		{"another transfer encoding", "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", "502"},
		{"a negative length", "HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok", "502"},
		{"no content with content", "HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\nok", "204  "},
		{"what Connection names", "HTTP/1.1 200 OK\r\nConnection: X-Odd, Content-Length\r\nX-Odd: 1\r\nContent-Length: 2\r\n\r\nok", "200  ok"},
		{"a chunk too large", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\nok", "cut"},
		{"a bad trailer is dropped", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX Odd: 1\r\n\r\n", "200  ok"},
		{"16 interim answers", strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 16) + "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "200  ok"},
		{"17 interim answers", strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 17) + "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", "502"},
		{"never", "", ""},
		{"half a line", "HTTP/1.1 20", ""},
		{"half a header", "HTTP/1.1 200 OK\r\nX-Odd: 1\r\n", ""},
	} {
		port := 1000 + i
		w.answers("a", port, func(c net.Conn) {
			r := bufio.NewReader(c)
			_, _ = http.ReadRequest(r)
			_, _ = io.WriteString(c, s.says)
			if s.want == "" {
				_, _ = r.ReadByte() // until the gateway leaves
				left <- struct{}{}
			}
		})
		ctx, cancel := context.WithCancel(t.Context())
		r, err := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("http://%d-a.%s/", port, domain), nil)
		if err != nil {
			t.Fatal(err)
		}
		c := w.client(nil)
		if s.want == "" {
			time.AfterFunc(20*time.Millisecond, cancel)
			if a, err := c.Do(r); err == nil {
				t.Errorf("%s: %s", s.name, a.Status)
			}
			<-left
			continue
		}
		got := ""
		if a, err := c.Do(r); err != nil {
			got = "cut"
		} else if got = fmt.Sprint(a.StatusCode); a.StatusCode != http.StatusBadGateway {
			body, err := io.ReadAll(a.Body)
			for h := range a.Header {
				if h != "X-Odd" && strings.HasPrefix(h, "X") || strings.HasPrefix(h, "Transfer") {
					t.Errorf("%s: the client sees %q", s.name, h)
				}
			}
			if got += " " + a.Header.Get("X-Odd") + " "; err != nil || len(a.Trailer) > 0 {
				body = []byte("cut")
			}
			got += string(body)
			a.Body.Close()
		}
		if cancel(); got != s.want {
			t.Errorf("%s: %q, want %q", s.name, got, s.want)
		}
	}
	until(t, "no request is open", func() bool { return w.gate.Stats().Open == 0 })
}

// gRPC goes to servers by HTTP/2, which can be as hostile.
func TestGateway_survives_hostile_servers_of_HTTP2(t *testing.T) {
	w := begin(t, nil)
	w.create("a", nil, spec.Idle{})
	left := make(chan struct{}, 16)
	for i, s := range []struct {
		name string
		do   func(*http2.Framer, func(...string) []byte, uint32) error // again and again, until it fails
		want string                                                    // "" is that the client has to leave
	}{
		{"lines in a value", func(f *http2.Framer, block func(...string) []byte, id uint32) error {
			return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, EndStream: true, BlockFragment: block(":status 200", "x-odd a\r\nx: b")})
		}, "502"},
		{"no status", func(f *http2.Framer, block func(...string) []byte, id uint32) error {
			return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, EndStream: true, BlockFragment: block("x-odd a")})
		}, "502"},
		{"a header without end", func(f *http2.Framer, block func(...string) []byte, id uint32) error {
			err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block(":status 200")})
			for err == nil {
				err = f.WriteContinuation(id, false, block("x-"+strings.Repeat("x", 1000)+" "+strings.Repeat("x", 8000)))
			}
			return err
		}, "502"},
		{"a flood of 1xx", func(f *http2.Framer, block func(...string) []byte, id uint32) error {
			return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, EndHeaders: true, BlockFragment: block(":status 103")})
		}, "502"},
		{"another stream", func(f *http2.Framer, _ func(...string) []byte, id uint32) error {
			return f.WriteData(id+2, true, nil)
		}, "502"},
		{"the end of the connection", func(f *http2.Framer, _ func(...string) []byte, id uint32) error {
			return errors.Join(f.WriteGoAway(id, http2.ErrCodeEnhanceYourCalm, nil), io.EOF)
		}, "502"},
		{"never", func(f *http2.Framer, _ func(...string) []byte, _ uint32) error {
			_, err := f.ReadFrame()
			return err
		}, ""},
	} {
		port := 1000 + i
		w.answers("a", port, func(c net.Conn) {
			x := &h2{t: t, c: c, f: http2.NewFramer(c, c)}
			x.enc = hpack.NewEncoder(&x.text)
			if _, err := io.ReadFull(c, make([]byte, len(http2.ClientPreface))); err != nil || x.f.WriteSettings() != nil {
				return
			}
			for {
				f, err := x.f.ReadFrame()
				if err != nil {
					return
				}
				if f.Header().Type == http2.FrameHeaders {
					if s.want == "" {
						left <- struct{}{}
					}
					for s.do(x.f, x.block, f.Header().StreamID) == nil {
					}
					if s.want == "" {
						left <- struct{}{}
					}
					return
				}
			}
		})
		x := w.h2(t)
		err := x.f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, EndHeaders: true, EndStream: true, BlockFragment: x.block(
			":method POST", ":scheme http", ":path /", fmt.Sprintf(":authority %d-a.%s", port, domain), "content-type application/grpc", "te trailers")})
		if err != nil {
			t.Fatal(err)
		}
		if s.want == "" {
			<-left // it has the request
			x.c.Close()
			<-left
			continue
		}
		if got := x.ended(1); got != s.want {
			t.Errorf("%s: %s, want %s", s.name, got, s.want)
		}
		x.c.Close()
	}
	until(t, "no request is open", func() bool { return w.gate.Stats().Open == 0 })
}

// A kill in the middle is no end: neither does a client take half an answer for a whole one, nor does it wait.
func TestGateway_a_kill_in_the_middle_of_a_request_or_an_answer_is_told_to_each_client(t *testing.T) {
	t.Run("to HTTP", func(t *testing.T) { killInTheMiddle(t, begin(t, nil)) })
	t.Run("to HTTPS", func(t *testing.T) { killInTheMiddle(t, beginHTTPS(t)) })
}

func killInTheMiddle(t *testing.T, w *world) {
	for _, version := range []string{"HTTP/1.1", "HTTP/2"} {
		for _, middle := range []string{"request", "server", "wait", "answer", "stream"} {
			name := strings.ToLower(strings.NewReplacer("/", "", ".", "").Replace(version)) + middle
			b := w.create(name, nil, spec.Idle{})
			there := make(chan struct{})
			w.serves(name, 80, func(rw http.ResponseWriter, r *http.Request) {
				switch middle {
				case "request", "server":
					_, _ = io.ReadFull(r.Body, make([]byte, 5))
					close(there)
					if middle == "server" {
						if c, _, err := http.NewResponseController(rw).Hijack(); err == nil {
							c.Close() // it breaks off, and the sandbox runs on
						}
						return
					}
					_, _ = io.Copy(io.Discard, r.Body) // until it is cut
					return
				case "answer":
					rw.Header().Set("Content-Length", "10")
					fallthrough
				case "stream":
					fmt.Fprint(rw, "begun")
					_ = http.NewResponseController(rw).Flush()
				}
				close(there)
				<-r.Context().Done()
			})
			var p http.Protocols
			p.SetHTTP1(version == "HTTP/1.1")
			p.SetUnencryptedHTTP2(version != "HTTP/1.1")
			c := w.client(nil)
			c.Transport.(*http.Transport).Protocols = &p
			body, more := io.Pipe() // of which the end never comes
			r, err := http.NewRequestWithContext(t.Context(), "POST", "http://80-"+name+"."+domain+"/", body)
			if err != nil {
				t.Fatal(err)
			}
			if middle != "request" && middle != "server" {
				r.Body = http.NoBody
			}
			var killed sync.WaitGroup
			killed.Go(func() {
				if r.Body != http.NoBody {
					_, _ = io.WriteString(more, "begun")
				}
				<-there
				if middle == "wait" || middle == "request" {
					if err := b.Kill(t.Context()); err != nil {
						t.Error(err)
					}
				}
			})
			a, err := c.Do(r)
			switch {
			case middle == "answer" || middle == "stream":
				if err != nil {
					t.Fatal(version, middle, err)
				}
				if _, err := io.ReadFull(a.Body, make([]byte, 5)); err != nil {
					t.Error(version, middle, err)
				}
				if err := b.Kill(t.Context()); err != nil {
					t.Fatal(err)
				}
				if rest, err := io.ReadAll(a.Body); err == nil || len(rest) > 0 {
					t.Errorf("%s, %s: %q and %v after a kill", version, middle, rest, err)
				}
			case err != nil:
				t.Errorf("%s, %s: %v", version, middle, err)
			case a.StatusCode != http.StatusBadGateway:
				t.Errorf("%s, %s: %s", version, middle, a.Status)
			}
			if a != nil {
				a.Body.Close()
			}
			more.Close()
			killed.Wait()
			until(t, "the request has ended", func() bool { return w.gate.Stats().Open == 0 && w.gate.Stats().Sessions == 0 })
			if err := b.Delete(t.Context(), sandbox.DeleteOptions{Force: true}); err != nil {
				t.Error(err)
			}
		}
	}
}

// One certificate is for all sandboxes: a name that a client shows for TLS opens nothing.
func TestGateway_the_host_of_each_request_counts_and_not_the_server_name_of_its_connection(t *testing.T) {
	cert, key, pool := certificate(t, t.TempDir(), 1, "*."+domain)
	w := begin(t, func(_ *gateway.Options, l *gateway.Listeners) {
		var err error
		if l.TLS, err = gateway.Certificates(cert, key, nil); err != nil {
			t.Fatal(err)
		}
	})
	seen := w.judged()
	for _, protocol := range []string{"http/1.1", "h2"} {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "80-a." + domain, NextProtos: []string{protocol}}, ForceAttemptHTTP2: protocol == "h2", DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "tcp", w.addr)
		}}
		c := &http.Client{Transport: tr}
		for _, s := range []struct {
			host   string
			status int
		}{{"80-a." + domain, 200}, {"80-closed." + domain, 401}, {"80-a." + domain, 200}, {"81-a." + domain, 502}, {"evil.test", 400}} {
			r, err := http.NewRequestWithContext(t.Context(), "GET", "https://80-a."+domain+"/", nil)
			if err != nil {
				t.Fatal(err)
			}
			r.Host = s.host
			a, err := c.Do(r)
			if err != nil {
				t.Fatal(protocol, s.host, err)
			}
			_, _ = io.Copy(io.Discard, a.Body)
			if a.Body.Close(); a.StatusCode != s.status {
				t.Errorf("%s, %s: %s, want %d", protocol, s.host, a.Status, s.status)
			}
		}
		tr.CloseIdleConnections()
		if got := seen.take(); strings.Count(got, "a GET") != 2 || strings.Contains(got, "closed") {
			t.Errorf("%s: seen %s", protocol, got)
		}
	}
}

func TestAttack_sandboxes_of_an_owner_that_do_not_wake_keep_others_asleep(t *testing.T) {
	w := begin(t, func(o *gateway.Options, _ *gateway.Listeners) { o.Limits = gateway.Limits{Waiting: 4, WaitingOf: 2} })
	for name, owner := range map[string]string{"a1": "a", "a2": "a", "b1": "b", "c1": ""} {
		w.createFor(owner, name, &spec.Gateway{AllPublic: true}, spec.Idle{})
		w.serves(name, 80, func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "ok") })
		w.sleep(name)
	}
	hold := make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	defer release()
	w.vms.Fail = func(op, name string) error {
		if op == "restore" && name[0] == 'a' {
			<-hold
		}
		return nil
	}
	var all sync.WaitGroup
	for _, name := range []string{"a1", "a1", "a2", "a2"} {
		all.Go(func() { w.get("80-" + name + "." + domain) })
	}
	until(t, "two wait, and two are refused", func() bool {
		s := w.gate.Stats()
		return s.Waiting == 2 && s.Refused == 2
	})
	for _, name := range []string{"b1", "c1"} {
		if a, body := w.get("80-" + name + "." + domain); body != "ok" {
			t.Errorf("%s is kept asleep: %s %s", name, a.Status, body)
		}
	}
	release()
	all.Wait()
}
