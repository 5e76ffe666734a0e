//go:build linux

package events

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// writeTime is how long an HTTP follower may take for one event; then its connection ends, and it continues from
// its cursor. quietTime is after how long a stream without events gets a comment, from which both ends learn
// whether the other one still exists.
const (
	writeTime = 30 * time.Second
	quietTime = 15 * time.Second
)

// Handler answers GET with events: one JSON object per line, or server-sent events if Accept asks for
// text/event-stream (https://html.spec.whatwg.org/multipage/server-sent-events.html), with the cursor as the id.
// The query has since (a cursor, or "now"; Last-Event-ID takes precedence), follow=1, type (several, or with
// commas), sandbox, owner and tag. It does not check the caller. refuse answers an invalid request.
func Handler(j *Journal, refuse func(w http.ResponseWriter, err error)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		o, follow, err := parseQuery(j, r)
		if err != nil {
			refuse(w, err)
			return
		}
		sse := strings.Contains(r.Header.Get("Accept"), "text/event-stream")
		w.Header().Set("Content-Type", "application/x-ndjson")
		if sse {
			w.Header().Set("Content-Type", "text/event-stream")
		}
		w.Header().Set("Cache-Control", "no-store")
		out := http.NewResponseController(w)
		write := func(text []byte) error {
			if err := out.SetWriteDeadline(time.Now().Add(writeTime)); err != nil && !errors.Is(err, http.ErrNotSupported) {
				return err
			}
			_, err := w.Write(text)
			return err
		}
		flush := func() error {
			if err := out.Flush(); err != nil && !errors.Is(err, http.ErrNotSupported) {
				return err
			}
			return nil
		}
		last := time.Now()
		give := func(e Event) error {
			line, err := json.Marshal(e)
			if err != nil {
				return err
			}
			last = time.Now()
			if sse {
				return write(fmt.Appendf(nil, "id: %d\nevent: %s\ndata: %s\n\n", e.Cursor, e.Type, line))
			}
			return write(append(line, '\n'))
		}
		if !follow {
			_, _ = j.Read(r.Context(), o, give) // the answer has begun: an error ends it
			return
		}
		begun := false
		o.Idle = func(uint64) error {
			if sse && (!begun || time.Since(last) >= quietTime) {
				if err := write([]byte(":\n\n")); err != nil {
					return err
				}
				last = time.Now()
			}
			begun = true
			return flush()
		}
		_ = j.Follow(r.Context(), o, give)
	})
}

func parseQuery(j *Journal, r *http.Request) (o ReadOptions, follow bool, err error) {
	q := r.URL.Query()
	for key := range q {
		switch key {
		case "since", "follow", "type", "sandbox", "owner", "tag":
		default:
			return o, false, inParam{key, fmt.Errorf("%w: there is no %q: use since, follow, type, sandbox, owner and tag", ErrInvalid, key)}
		}
	}
	since := q.Get("since")
	if id := r.Header.Get("Last-Event-ID"); id != "" {
		since = id
	}
	if o.Since, err = j.ParseCursor(since); err != nil {
		return o, false, err
	}
	if text := q.Get("follow"); text != "" {
		if follow, err = strconv.ParseBool(text); err != nil {
			return o, false, inParam{"follow", fmt.Errorf("%w: follow=%q: use 1 or 0", ErrInvalid, text)}
		}
	}
	for _, text := range q["type"] {
		o.Filter.Types = append(o.Filter.Types, parseTypes(text)...)
	}
	o.Filter.Sandbox, o.Filter.Owner, o.Filter.Tags = q.Get("sandbox"), q.Get("owner"), q["tag"]
	return o, follow, o.Filter.Check()
}

// ParseCursor reads a cursor: a number, "now", or nothing for the oldest kept event.
func (j *Journal) ParseCursor(text string) (uint64, error) {
	switch text {
	case "":
		return 0, nil
	case "now":
		return j.Newest()
	}
	n, err := strconv.ParseUint(text, 10, 53)
	if err != nil {
		return 0, inParam{"since", fmt.Errorf("%w: %q is no cursor: use that of an event, or now", ErrInvalid, text)}
	}
	return n, nil
}
