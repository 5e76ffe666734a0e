package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"
)

// The errors of a connection. ErrProtocol is another.
var (
	ErrClosed     = errors.New("this end of the connection has been closed")
	ErrPeerClosed = errors.New("the peer has closed its end, or its process has ended")
	ErrStalled    = errors.New("the peer does not read what it is sent")
)

// ErrBusy is Post's error while the peer has not served earlier posts.
var ErrBusy = errors.New("the peer has not served earlier posts yet: drop this one, or try again later")

// maxErrorText and maxErrno bound what an error of the peer can say. maxErrno is the kernel's MAX_ERRNO.
const (
	maxErrorText = 4 << 10
	maxErrno     = 4095
)

// A wireError is the body of kindError.
type wireError struct {
	Text  string   `json:"text"`
	Errno int      `json:"errno,omitempty"`
	Codes []string `json:"codes,omitempty"`
}

// A remoteError reads as the error that the peer's handler returned.
type remoteError struct {
	text   string
	causes []error
}

func (e *remoteError) Error() string   { return e.text }
func (e *remoteError) Unwrap() []error { return e.causes }

// sentinels translates errors that keep their identity.
type sentinels map[string]error

func newSentinels(of map[string]error) sentinels {
	s := sentinels{"context.Canceled": context.Canceled, "context.DeadlineExceeded": context.DeadlineExceeded}
	maps.Copy(s, of)
	return s
}

func (s sentinels) encode(err error) []byte {
	w := wireError{Text: printable(err.Error())}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		w.Errno = int(errno)
	}
	for code, is := range s {
		if errors.Is(err, is) {
			w.Codes = append(w.Codes, code)
		}
	}
	slices.Sort(w.Codes)
	b, err := json.Marshal(w)
	if err != nil { // no value of this type fails
		return []byte("{}")
	}
	return b
}

func (s sentinels) decode(body []byte) error {
	var w wireError
	if err := json.Unmarshal(body, &w); err != nil {
		return fmt.Errorf("the peer failed, and its error cannot be read: %s", printable(err.Error()))
	}
	e := &remoteError{text: printable(w.Text)}
	if e.text == "" {
		e.text = "the peer failed and does not say why"
	}
	if 0 < w.Errno && w.Errno <= maxErrno {
		e.causes = append(e.causes, syscall.Errno(w.Errno))
	}
	for _, code := range w.Codes[:min(len(w.Codes), len(s))] {
		if is, ok := s[code]; ok {
			e.causes = append(e.causes, is)
		}
	}
	return e
}

// printable returns a text that does no harm in a log or a terminal.
func printable(text string) string {
	if len(text) > maxErrorText {
		const more = "..."
		n := maxErrorText - len(more)
		for i := 1; i < utf8.UTFMax && !utf8.RuneStart(text[n]); i++ {
			n--
		}
		text = text[:n] + more
	}
	return strings.Map(func(r rune) rune {
		switch {
		case r == utf8.RuneError:
			return '?'
		case unicode.IsPrint(r):
			return r
		}
		return ' '
	}, text)
}
