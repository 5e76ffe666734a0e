// Package answers has what the control plane of E2B's wire reads and says: bodies, errors, pages and ids.
package answers

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Error is an error as clients of the control plane see it.
type Error struct {
	Code    int    `json:"code"` // HTTP status
	Message string `json:"message"`
	// Kind is E2B's word for an error of the server.
	Kind string `json:"error_code,omitempty"`

	// Cause is the error of the host, which clients do not see.
	Cause error `json:"-"`
}

// Error implements error.
func (e *Error) Error() string { return e.Message }

// Unwrap returns Cause.
func (e *Error) Unwrap() error { return e.Cause }

// Fail is an error with a status of HTTP.
func Fail(code int, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Refused is the error for a field that asks for what cannot be done.
func Refused(field, why string) *Error {
	return Fail(http.StatusBadRequest, "%s is not supported: %s", field, why)
}

// Write answers with an error.
func (e *Error) Write(w http.ResponseWriter) {
	if e.Code == http.StatusTooManyRequests {
		w.Header().Set("Retry-After", strconv.Itoa(retrySeconds))
	}
	WriteJSON(w, e.Code, e)
}

// retrySeconds is after how many seconds a client may ask again.
const retrySeconds = 1

// WriteJSON answers with a document.
func WriteJSON(w http.ResponseWriter, status int, body any) {
	h := w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // an error means that the client has gone
}

// Bounds of a body.
const (
	maxBody  = 1 << 20          // bytes
	bodyTime = 30 * time.Second // until it has arrived
)

// Read reads a body of JSON into v. An empty body leaves v as it is. Unknown fields are errors that name the field: a
// client must not believe in what is not done.
func Read(w http.ResponseWriter, r *http.Request, v any) error {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
	defer func() { _ = http.NewResponseController(w).SetReadDeadline(time.Time{}) }()
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return Fail(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", maxBody)
	case err != nil:
		return Fail(http.StatusBadRequest, "the body could not be read")
	case len(bytes.TrimSpace(data)) == 0:
		return nil
	}
	if kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); kind != "" && strings.TrimSpace(kind) != "application/json" {
		return Fail(http.StatusUnsupportedMediaType, "use a body of application/json")
	}
	return Parse(data, v)
}

// Parse is Read for the bytes of a body.
func Parse(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		text := strings.TrimPrefix(err.Error(), "json: ")
		if field, ok := strings.CutPrefix(text, "unknown field "); ok {
			return Refused(strings.Trim(field, `"`), "this server does not know the field")
		}
		return Fail(http.StatusBadRequest, "the body is not what it should be: %s", text)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return Fail(http.StatusBadRequest, "there is more after the JSON object of the body")
	}
	return nil
}

// MaxPage bounds a page.
const MaxPage = 100

// Page returns the elements of a page of a sorted list, and sets the header with the next one. key returns the
// Position of an element.
func Page[T any](w http.ResponseWriter, q url.Values, all []T, key func(T) string) ([]T, error) {
	limit := MaxPage
	if text := q.Get("limit"); text != "" {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 {
			return nil, Fail(http.StatusBadRequest, "limit: use 1 to %d", MaxPage)
		}
		limit = min(n, MaxPage)
	}
	if text := q.Get("nextToken"); text != "" {
		after, err := base64.RawURLEncoding.DecodeString(text)
		if err != nil {
			return nil, Fail(http.StatusBadRequest, "nextToken is not one")
		}
		i := slices.IndexFunc(all, func(t T) bool { return key(t) > string(after) })
		if i < 0 {
			return []T{}, nil
		}
		all = all[i:]
	}
	if len(all) > limit {
		all = all[:limit]
		w.Header().Set("X-Next-Token", base64.RawURLEncoding.EncodeToString([]byte(key(all[limit-1]))))
	}
	return all, nil
}

// Position orders by time, the newest first.
func Position(at time.Time, id string) string {
	return fmt.Sprintf("%020d %s", uint64(1<<63-1)-uint64(at.UnixNano()), id)
}

// NewID returns an id of E2B's form.
func NewID() string { return "i" + strings.ToLower(rand.Text()[:19]) }

// Absent reports whether a field asks for nothing.
func Absent(raw json.RawMessage) bool {
	switch strings.TrimSpace(string(raw)) {
	case "", "null", "[]", "{}", "false":
		return true
	}
	return false
}
