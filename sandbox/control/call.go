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

// Orders is the path under which a VM's process takes orders: POST Orders+NAME with JSON. Processes of earlier
// versions take orders at other paths. Old and new processes refuse each other's orders.
const Orders = "/orders/"

const (
	// maxAnswer is the most bytes of an answer.
	maxAnswer = 16 << 20
	// MaxEventLine is the most bytes of one event as JSON.
	MaxEventLine = 64 << 10
)

// Do gives a VM's process an order with its arguments, and decodes the answer into out unless out is nil.
func Do(ctx context.Context, s *state.Store, name, order string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return fmt.Errorf("asking the process of VM %s: %w", name, err)
	}
	defer clear(body) // it may have secrets
	return call(ctx, s, name, http.MethodPost, Orders+order, body, into(out))
}

// Get asks a VM's process for what is at path, and decodes the answer into out.
func Get(ctx context.Context, s *state.Store, name, path string, out any) error {
	return Read(ctx, s, name, path, into(out))
}

// Read is Get with a function that reads the answer.
func Read(ctx context.Context, s *state.Store, name, path string, read func(io.Reader) error) error {
	return call(ctx, s, name, http.MethodGet, path, nil, read)
}

func into(out any) func(io.Reader) error {
	return func(body io.Reader) error {
		if out == nil {
			return nil
		}
		return json.NewDecoder(io.LimitReader(body, maxAnswer)).Decode(out)
	}
}

func call(ctx context.Context, s *state.Store, name, method, path string, send []byte, read func(io.Reader) error) error {
	r, err := s.Get(name)
	if err != nil {
		return err
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
		if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&e); err != nil || e.Message == "" {
			return fmt.Errorf("asking the process of VM %s: %w", name, unexpected(resp, path))
		}
		return &e
	}
	if err := read(resp.Body); err != nil {
		return fmt.Errorf("asking the process of VM %s: %w", name, err)
	}
	return nil
}

// unexpected returns the error for a process that does not know the request at path.
func unexpected(resp *http.Response, path string) error {
	if resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusMethodNotAllowed {
		return fmt.Errorf("it is of another version of drowse, and does not know %s: put the VM to sleep by a SIGTERM to it (`drowse inspect` says its pid), and wake the VM", path)
	}
	return fmt.Errorf("it answered %s", resp.Status)
}

// causeHeader tells the process of a VM on whose behalf a request is made.
const causeHeader = "Drowse-Cause"

// WithCause returns the context for the work of a request. The work continues if the caller goes away.
func WithCause(r *http.Request) context.Context {
	ctx := context.WithoutCancel(r.Context())
	if c := events.Cause(r.Header.Get(causeHeader)); c.Check() == nil {
		ctx = events.WithCause(ctx, c)
	}
	return ctx
}
