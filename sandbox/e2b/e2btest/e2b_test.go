package e2btest

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/process"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// answer is the answer to a request.
type answer struct {
	status int
	header http.Header
	body   string
}

// ask sends a request of the control plane with the key.
func (w *world) ask(method, path string, body any, header ...string) answer {
	w.t.Helper()
	var r io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(b)
	default:
		data, err := json.Marshal(b)
		if err != nil {
			w.t.Fatal(err)
		}
		r = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(w.t.Context(), method, w.url+path, r)
	if err != nil {
		w.t.Fatal(err)
	}
	req.Header.Set("X-API-KEY", w.key)
	if r != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		if header[i+1] == "" {
			req.Header.Del(header[i])
		}
	}
	return w.do(req)
}

func (w *world) do(req *http.Request) answer {
	w.t.Helper()
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, string(text)}
}

// made is a sandbox that was created.
type made struct {
	SandboxID          string
	EnvdAccessToken    string
	TrafficAccessToken string
}

func (w *world) create(body map[string]any) made {
	w.t.Helper()
	if body["templateID"] == nil {
		body["templateID"] = "base"
	}
	a := w.ask("POST", "/v2/sandboxes", body)
	var m made
	if err := json.Unmarshal([]byte(a.body), &m); err != nil || a.status != http.StatusCreated {
		w.t.Fatalf("%d %s %v", a.status, a.body, err)
	}
	return m
}

// processes returns a client of the processes of a sandbox.
func (w *world) processes(m made) process.ProcessClient {
	return process.NewProcessClient(http.DefaultClient, w.url, connect.WithProtoJSON(), connect.WithInterceptors(shown{m}))
}

type shown struct{ m made }

func (t shown) set(h http.Header) {
	h.Set("E2b-Sandbox-Id", t.m.SandboxID)
	h.Set("E2b-Sandbox-Port", "49983")
	h.Set("X-Access-Token", t.m.EnvdAccessToken)
	h.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("root:")))
}

func (t shown) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
		t.set(r.Header())
		return next(ctx, r)
	}
}

func (t shown) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, s connect.Spec) connect.StreamingClientConn {
		c := next(ctx, s)
		t.set(c.RequestHeader())
		return c
	}
}

func (t shown) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}

// run runs a command of a shell to its end.
func (w *world) run(m made, text string) (stdout, stderr string, end *process.ProcessEvent_EndEvent, err error) {
	no := false
	s, err := w.processes(m).Start(w.t.Context(), &process.StartRequest{
		Process: &process.ProcessConfig{Cmd: "/bin/bash", Args: []string{"-c", text}}, Stdin: &no,
	})
	if err != nil {
		return "", "", nil, err
	}
	defer s.Close()
	for s.Receive() {
		e := s.Msg().GetEvent()
		stdout += string(e.GetData().GetStdout())
		stderr += string(e.GetData().GetStderr())
		if e.GetEnd() != nil {
			end = e.GetEnd()
		}
	}
	return stdout, stderr, end, s.Err()
}

func TestServer_runs_a_command_in_a_new_sandbox(t *testing.T) {
	w := begin(t, newGuests(t), nil)
	m := w.create(map[string]any{"envVars": map[string]string{"A": "b"}})
	out, errs, end, err := w.run(m, "echo $A; id -un; pwd; echo no >&2; exit 3")
	if err != nil || out != "b\nroot\n/root\n" || errs != "no\n" || end.GetExitCode() != 3 || !end.GetExited() || end.GetStatus() != "exit status 3" {
		t.Errorf("%q %q %v %v", out, errs, end, err)
	}
	if a := w.ask("DELETE", "/sandboxes/"+m.SandboxID, nil); a.status != http.StatusNoContent {
		t.Errorf("removed: %d %s", a.status, a.body)
	}
	if a := w.ask("GET", "/sandboxes/"+m.SandboxID, nil); a.status != http.StatusNotFound {
		t.Errorf("looked at when removed: %d %s", a.status, a.body)
	}
}

func TestList_is_filtered_by_words_that_clients_encode_once_or_twice(t *testing.T) {
	w := begin(t, nil, nil)
	m := w.create(map[string]any{"metadata": map[string]string{"team/slug!": "hello & 100% ü", "v": "1"}})
	w.create(map[string]any{"metadata": map[string]string{"v": "1"}})
	words := map[string]string{"team/slug!": "hello & 100% ü"}
	for name, encode := range map[string]func(string) string{
		"once": func(s string) string { return s }, "twice": url.PathEscape,
	} {
		q := url.Values{}
		for k, v := range words {
			q.Set(encode(k), encode(v))
		}
		var list []made
		a := w.ask("GET", "/v2/sandboxes?metadata="+url.QueryEscape(q.Encode()), nil)
		if err := json.Unmarshal([]byte(a.body), &list); err != nil || len(list) != 1 || list[0].SandboxID != m.SandboxID {
			t.Errorf("%s: %v", name, a)
		}
	}
}

func TestTime_of_a_sandbox_begins_when_it_can_be_used(t *testing.T) {
	w := begin(t, newGuests(t), nil)
	start := w.vms.Guests
	w.vms.Guests = func(name, from string, clone bool) (sandboxtest.Guest, error) {
		time.Sleep(4 * time.Second) // longer than its time
		return start(name, from, clone)
	}
	usable := func(m made) {
		t.Helper()
		md, err := w.host.State.Metadata(m.SandboxID)
		if left := time.Until(md.Expires); err != nil || left > 3*time.Second {
			t.Error("its time is over in", left, err)
		}
		if a := w.ask("GET", "/sandboxes/"+m.SandboxID, nil); a.status != http.StatusOK {
			t.Error(a)
		}
	}
	m := w.create(map[string]any{"timeout": 2})
	usable(m)
	if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/timeout", map[string]any{"timeout": 60}); a.status != http.StatusNoContent {
		t.Fatal(a)
	}
	var forks []struct{ Sandbox made }
	if a := w.ask("POST", "/sandboxes/"+m.SandboxID+"/fork", map[string]any{"timeout": 2}); json.Unmarshal([]byte(a.body), &forks) != nil || len(forks) != 1 || forks[0].Sandbox.SandboxID == "" {
		t.Fatal(a)
	}
	usable(forks[0].Sandbox)
}
