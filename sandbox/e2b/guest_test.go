package e2b_test

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b"
	"github.com/drowse-vm/drowse/sandbox/e2b/e2bpb/process"
)

// A real guest behind the wire: what package e2btest shows with the SDKs rests on this.
func TestGuest_is_used_paused_resumed_and_forked_through_the_wire(t *testing.T) {
	e := guesttest.New(t)
	keys := tokens.Open(filepath.Join(t.TempDir(), "tokens"))
	key, err := keys.CreateE2B(tokens.Token{Name: "test", Scopes: tokens.All()})
	if err != nil {
		t.Fatal(err)
	}
	s, err := e2b.New(e2b.Options{Host: e.Store.With(e.Launcher), Tokens: keys, Templates: map[string]string{"base": guesttest.ImageTag}})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(s)
	defer func() {
		server.CloseClientConnections()
		server.Close()
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	}()
	type made struct{ SandboxID, EnvdAccessToken string }
	ask := func(want int, method, path, body string, m *made, out any) string {
		t.Helper()
		r, err := http.NewRequestWithContext(t.Context(), method, server.URL+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if m == nil {
			r.Header.Set("X-API-KEY", key)
		} else {
			headers(r.Header, m.SandboxID, m.EnvdAccessToken)
			r.Header.Set("Content-Type", "application/octet-stream")
		}
		resp, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != want {
			t.Fatalf("%s %s: %d %s %v, want %d", method, path, resp.StatusCode, text, err, want)
		}
		if out != nil {
			if err := json.Unmarshal(text, out); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
		}
		return string(text)
	}
	client := func(m made) process.ProcessClient {
		return process.NewProcessClient(&http.Client{Transport: withHeaders(m)}, server.URL, connect.WithProtoJSON())
	}
	start := func(m made, script string, stdin bool) (*connect.ServerStreamForClient[process.StartResponse], uint32) {
		t.Helper()
		out, err := client(m).Start(t.Context(), &process.StartRequest{Process: &process.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}, Stdin: &stdin})
		if err != nil || !out.Receive() {
			t.Fatal(err, out)
		}
		return out, out.Msg().GetEvent().GetStart().GetPid()
	}
	run := func(m made, script string) (out string, end *process.ProcessEvent_EndEvent) {
		t.Helper()
		s, _ := start(m, script, false)
		defer s.Close()
		for s.Receive() {
			out += string(s.Msg().GetEvent().GetData().GetStdout())
			end = s.Msg().GetEvent().GetEnd()
		}
		if err := s.Err(); err != nil {
			t.Fatal(err)
		}
		return out, end
	}

	var m, again made
	ask(http.StatusCreated, "POST", "/v2/sandboxes", `{"templateID":"base","timeout":3600,"envVars":{"A":"b"}}`, nil, &m)
	if out, end := run(m, "echo $A $E2B_SANDBOX_ID; exit 3"); out != "b "+m.SandboxID+"\n" || end.GetExitCode() != 3 {
		t.Errorf("%q %v", out, end)
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 1<<14)
	ask(http.StatusOK, "POST", "/files?path=/tmp/deep/data", string(data), &m, nil)
	attached, err := http.NewRequestWithContext(t.Context(), "POST", server.URL+"/files?path=/root/attached", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	headers(attached.Header, m.SandboxID, m.EnvdAccessToken)
	attached.Header.Set("Content-Type", "application/octet-stream")
	attached.Header.Set("X-Metadata-Who", "me")
	resp, err := http.DefaultClient.Do(attached)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err := io.ReadAll(resp.Body); err != nil || !strings.Contains(string(text), `"metadata":{"who":"me"}`) {
		t.Errorf("%d %s %v", resp.StatusCode, text, err)
	}
	if out, _ := run(m, "cat /run/e2b/.E2B_SANDBOX_ID /run/e2b/envs.json"); out != m.SandboxID+`{"A":"b"}` {
		t.Errorf("it is introduced as %q", out)
	}
	var samples []struct{ MemTotal, DiskTotal uint64 }
	ask(http.StatusOK, "GET", "/sandboxes/"+m.SandboxID+"/metrics", "", nil, &samples)
	if len(samples) == 0 || samples[0].MemTotal == 0 || samples[0].DiskTotal == 0 {
		t.Error(samples)
	}
	waiting, pid := start(m, "read x; echo got $x", true)
	ask(http.StatusNoContent, "POST", "/sandboxes/"+m.SandboxID+"/pause", "", nil, nil)
	for waiting.Receive() { // the pause cuts it
	}
	waiting.Close()
	asleep := samples[:0:0]
	ask(http.StatusOK, "GET", "/sandboxes/"+m.SandboxID+"/metrics", "", nil, &asleep)
	if len(asleep) < len(samples) {
		t.Errorf("%d samples asleep, %d before", len(asleep), len(samples))
	}
	ask(http.StatusBadGateway, "GET", "/health", "", &m, nil)
	ask(http.StatusCreated, "POST", "/v2/sandboxes/"+m.SandboxID+"/connect", `{"timeout":3600}`, nil, &again)
	if again != m {
		t.Errorf("%v is back as %v", m, again)
	}
	if got := ask(http.StatusOK, "GET", "/files?path=/tmp/deep/data", "", &m, nil); got != string(data) {
		t.Errorf("%d bytes are back of %d, or others", len(got), len(data))
	}

	// The process went on through the pause, and is followed again by another client.
	selector := &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: pid}}
	joined, err := client(m).Connect(t.Context(), &process.ConnectRequest{Process: selector})
	if err != nil || !joined.Receive() {
		t.Fatal(err, joined.Err())
	}
	defer joined.Close()
	if _, err := client(m).SendInput(t.Context(), &process.SendInputRequest{Process: selector, Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte("it\n")}}}); err != nil {
		t.Error(err)
	}
	out := ""
	for joined.Receive() {
		out += string(joined.Msg().GetEvent().GetData().GetStdout())
	}
	if out != "got it\n" || joined.Err() != nil {
		t.Errorf("%q %v", out, joined.Err())
	}

	var forks []struct{ Sandbox made }
	ask(http.StatusCreated, "POST", "/sandboxes/"+m.SandboxID+"/fork", `{"timeout":3600}`, nil, &forks)
	if len(forks) != 1 {
		t.Fatal(forks)
	}
	child := forks[0].Sandbox
	if out, _ := run(child, "echo child > /tmp/own; stat -c %s /tmp/deep/data; echo $E2B_SANDBOX_ID"); out != "262144\n"+child.SandboxID+"\n" {
		t.Errorf("%q", out)
	}
	if out, _ := run(child, "cat /run/e2b/.E2B_SANDBOX_ID"); out != child.SandboxID {
		t.Errorf("the child is introduced as %q", out)
	}
	ask(http.StatusNotFound, "GET", "/files?path=/tmp/own", "", &m, nil)
	ask(http.StatusUnauthorized, "GET", "/files?path=/tmp/own", "", &made{child.SandboxID, m.EnvdAccessToken}, nil)
	for _, s := range []made{m, child} {
		ask(http.StatusNoContent, "DELETE", "/sandboxes/"+s.SandboxID, "", nil, nil)
	}
}

func headers(h http.Header, id, token string) {
	h.Set("E2b-Sandbox-Id", id)
	h.Set("E2b-Sandbox-Port", "49983")
	h.Set("X-Access-Token", token)
}

// withHeaders has all requests go to a sandbox.
type withHeaders struct{ SandboxID, EnvdAccessToken string }

func (m withHeaders) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	headers(r.Header, m.SandboxID, m.EnvdAccessToken)
	return http.DefaultTransport.RoundTrip(r)
}
