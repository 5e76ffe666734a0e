// Package bodies has what bodies of requests and of answers need that files may be.
package bodies

import (
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Accepts reports whether a client takes an encoding of an answer: RFC 9110, 12.5.3.
func Accepts(header []string, encoding string) bool {
	named, star := -1.0, -1.0
	for part := range strings.SplitSeq(strings.Join(header, ","), ",") {
		name, params, _ := strings.Cut(part, ";")
		q := 1.0
		if v, ok := strings.CutPrefix(strings.TrimSpace(params), "q="); ok {
			if n, err := strconv.ParseFloat(v, 64); err == nil {
				q = n
			}
		}
		switch strings.ToLower(strings.TrimSpace(name)) {
		case encoding:
			named = q
		case "*":
			star = q
		}
	}
	if named < 0 {
		named = star
	}
	if named < 0 {
		return encoding == "identity"
	}
	return named > 0
}

// Stalling ends an answer or a body that stands still for StallTime: its deadline moves on with each piece.
type Stalling struct{ *http.ResponseController }

// StallTime is how long a body or an answer may stand still.
const StallTime = time.Minute

// Deadlines are the connection's, and others follow on it: whoever sets one ends it.
func (s Stalling) read()  { _ = s.SetReadDeadline(time.Now().Add(StallTime)) }
func (s Stalling) write() { _ = s.SetWriteDeadline(time.Now().Add(StallTime)) }

// Writer moves the deadline of an answer.
type Writer struct {
	http.ResponseWriter
	S Stalling
}

// Write implements io.Writer.
func (w Writer) Write(p []byte) (int, error) {
	w.S.write()
	return w.ResponseWriter.Write(p)
}

// Reader moves the deadline of a body.
type Reader struct {
	io.Reader
	S Stalling
}

// Read implements io.Reader.
func (r Reader) Read(p []byte) (int, error) {
	r.S.read()
	n, err := r.Reader.Read(p)
	if err != nil {
		_ = r.S.SetReadDeadline(time.Time{})
	}
	return n, err
}
