package control

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"syscall"

	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// Call asks a VM's process for something.
func Call(ctx context.Context, s *state.Store, name, method, path string, out any) error {
	return CallWith(ctx, s, name, method, path, nil, func(body io.Reader) error {
		return json.NewDecoder(io.LimitReader(body, 16<<20)).Decode(out)
	})
}

// CallWith is call with a body, and with what reads the answer.
func CallWith(ctx context.Context, s *state.Store, name, method, path string, send []byte, read func(io.Reader) error) error {
	r, err := s.Get(name)
	if err != nil {
		return err
	}
	if r.Phase == state.Starting {
		return fmt.Errorf("%w: %s is starting", spec.ErrNotRunning, name)
	}
	if r.Phase != state.Running {
		return fmt.Errorf("%w: %s is %s", spec.ErrNotRunning, name, r.Phase)
	}
	client := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", s.ControlSocket(name))
		},
		DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://vm"+path, bytes.NewReader(send))
	if err != nil {
		return err
	}
	req.Header.Set(causeHeader, string(events.CauseOf(ctx)))
	resp, err := client.Do(req)
	var ue *url.Error
	if errors.As(err, &ue) {
		err = ue.Err
	}
	if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("%w: %s: its process does not answer", spec.ErrNotRunning, name)
	}
	if err != nil {
		return fmt.Errorf("asking the process of VM %s: %w", name, err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		var e ErrorReport
		if err := json.NewDecoder(io.LimitReader(resp.Body, 16<<20)).Decode(&e); err != nil || e.Message == "" {
			return fmt.Errorf("asking the process of VM %s: it answered %s", name, resp.Status)
		}
		return &e
	}
	if err := read(resp.Body); err != nil {
		return fmt.Errorf("asking the process of VM %s: %w", name, err)
	}
	return nil
}

// causeHeader tells the process of a VM on whose behalf it is asked for something.
const causeHeader = "Drowse-Cause"

// WithCause is the context for what a request asks for, which goes on if the one who asked goes away.
func WithCause(r *http.Request) context.Context {
	ctx := context.WithoutCancel(r.Context())
	if c := events.Cause(r.Header.Get(causeHeader)); c.Check() == nil {
		ctx = events.WithCause(ctx, c)
	}
	return ctx
}

// Discard reads an answer that says nothing.
func Discard(io.Reader) error { return nil }
