package e2b

import (
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/sandbox/e2b/answers"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
)

// createBody is the body of a creation.
type createBody struct {
	TemplateID      string            `json:"templateID"`
	Timeout         *int64            `json:"timeout"`
	Metadata        map[string]string `json:"metadata"`
	EnvVars         map[string]string `json:"envVars"`
	AutoPause       bool              `json:"autoPause"`
	AutoPauseMemory *bool             `json:"autoPauseMemory"`
	AutoResume      *resumeBody       `json:"autoResume"`
	Internet        *bool             `json:"allow_internet_access"`
	Network         *networkBody      `json:"network"`
	IAM             json.RawMessage   `json:"iam"`
	VolumeMounts    json.RawMessage   `json:"volumeMounts"`
	// Secure asks for a token, which is needed in any case.
	Secure *bool `json:"secure"`
	// MCP is for the client itself: it starts the program mcp-gateway of the template with it.
	MCP json.RawMessage `json:"mcp"`
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
		{"iam", b.IAM, "no tokens of identities are issued"},
		{"volumeMounts", b.VolumeMounts, "volumes are attached with drowse's own API"},
	} {
		if !answers.Absent(f.raw) {
			return answers.Refused(f.name, f.why)
		}
	}
	resume := b.AutoResume != nil && b.AutoResume.Enabled
	switch {
	case b.TemplateID == "":
		return answers.Fail(http.StatusBadRequest, "templateID is missing")
	case b.AutoPauseMemory != nil && !*b.AutoPauseMemory && (resume || !b.AutoPause):
		return answers.Refused("autoPauseMemory false", "it goes with autoPause, and not with autoResume")
	case resume && !b.AutoPause:
		return answers.Refused("autoResume", "it goes with autoPause")
	}
	for k := range b.EnvVars {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(b.EnvVars[k], "\x00") {
			return answers.Fail(http.StatusBadRequest, "envVars: a name is empty or has =, or a zero byte is in it")
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
		return 0, answers.Fail(http.StatusBadRequest, "a timeout of %d s: use 0 to %d", n, int64(lifetime.MaxSeconds))
	}
	return time.Duration(n) * time.Second, nil
}

// expiry returns when a time from now on is over. Expiries are whole seconds: nobody gets less than he asked for.
func expiry(now time.Time, timeout time.Duration) time.Time {
	return now.Add(timeout + time.Second - 1).Truncate(time.Second)
}
