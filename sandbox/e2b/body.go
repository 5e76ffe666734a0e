package e2b

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// read reads a body of JSON into v. An empty body leaves v as it is. Unknown fields are errors that name the field: a
// client must not believe in what is not done.
func read(w http.ResponseWriter, r *http.Request, v any) error {
	_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(bodyTime))
	defer func() { _ = http.NewResponseController(w).SetReadDeadline(time.Time{}) }()
	data, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
	var large *http.MaxBytesError
	switch {
	case errors.As(err, &large):
		return fail(http.StatusRequestEntityTooLarge, "the body has more than %d bytes", maxBody)
	case err != nil:
		return fail(http.StatusBadRequest, "the body could not be read")
	case len(bytes.TrimSpace(data)) == 0:
		return nil
	}
	if kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); kind != "" && strings.TrimSpace(kind) != "application/json" {
		return fail(http.StatusUnsupportedMediaType, "use a body of application/json")
	}
	return parse(data, v)
}

func parse(data []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		text := strings.TrimPrefix(err.Error(), "json: ")
		if field, ok := strings.CutPrefix(text, "unknown field "); ok {
			return refused(strings.Trim(field, `"`), "this server does not know the field")
		}
		return fail(http.StatusBadRequest, "the body is not what it should be: %s", text)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fail(http.StatusBadRequest, "there is more after the JSON object of the body")
	}
	return nil
}

// createBody is the body of a creation.
type createBody struct {
	TemplateID      string            `json:"templateID"`
	Timeout         *int64            `json:"timeout"`
	Metadata        map[string]string `json:"metadata"`
	EnvVars         map[string]string `json:"envVars"`
	MCP             json.RawMessage   `json:"mcp"`
	AutoPause       bool              `json:"autoPause"`
	AutoPauseMemory *bool             `json:"autoPauseMemory"`
	AutoResume      *resumeBody       `json:"autoResume"`
	Internet        *bool             `json:"allow_internet_access"`
	Network         *networkBody      `json:"network"`
	IAM             json.RawMessage   `json:"iam"`
	VolumeMounts    json.RawMessage   `json:"volumeMounts"`
	// Secure asks for a token, which is needed in any case.
	Secure *bool `json:"secure"`
}

type resumeBody struct {
	Enabled bool `json:"enabled"`
}

// check refuses what cannot be done.
func (b *createBody) check() error {
	for _, f := range []struct {
		name string
		raw  json.RawMessage
		why  string
	}{
		{"mcp", b.MCP, "no server of the Model Context Protocol runs in a sandbox"},
		{"iam", b.IAM, "no tokens of identities are issued"},
		{"volumeMounts", b.VolumeMounts, "volumes are attached with drowse's own API"},
	} {
		if !absent(f.raw) {
			return refused(f.name, f.why)
		}
	}
	resume := b.AutoResume != nil && b.AutoResume.Enabled
	switch {
	case b.TemplateID == "":
		return fail(http.StatusBadRequest, "templateID is missing")
	case b.AutoPauseMemory != nil && !*b.AutoPauseMemory && (resume || !b.AutoPause):
		return refused("autoPauseMemory false", "it goes with autoPause, and not with autoResume")
	case resume && !b.AutoPause:
		return refused("autoResume", "it goes with autoPause")
	}
	for k := range b.EnvVars {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(b.EnvVars[k], "\x00") {
			return fail(http.StatusBadRequest, "envVars: a name is empty or has =, or a zero byte is in it")
		}
	}
	return nil
}

// seconds returns a timeout of a request, or a default.
func seconds(asked *int64, otherwise int64) (time.Duration, error) {
	n := otherwise
	if asked != nil {
		n = *asked
	}
	if n < 0 || n > lifetime.MaxSeconds {
		return 0, fail(http.StatusBadRequest, "a timeout of %d s: use 0 to %d", n, int64(lifetime.MaxSeconds))
	}
	return time.Duration(n) * time.Second, nil
}

// expiry returns when a time from now on is over. Expiries are whole seconds: nobody gets less than he asked for.
func expiry(now time.Time, timeout time.Duration) time.Time {
	return now.Add(timeout + time.Second - 1).Truncate(time.Second)
}
