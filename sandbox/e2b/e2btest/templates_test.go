package e2btest

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/e2b"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

// requested is a build that was asked for.
type requested struct{ TemplateID, BuildID string }

func (w *world) request(key, name string) requested {
	w.t.Helper()
	var b requested
	if a := w.ask("POST", "/v3/templates", map[string]any{"name": name}, "X-API-KEY", key); a.status != http.StatusAccepted || json.Unmarshal([]byte(a.body), &b) != nil {
		w.t.Fatal(a)
	}
	return b
}

// build builds a template, and returns why that failed, or "".
func (w *world) build(key string, b requested, body map[string]any) string {
	w.t.Helper()
	if a := w.ask("POST", "/v2/templates/"+b.TemplateID+"/builds/"+b.BuildID, body, "X-API-KEY", key); a.status != http.StatusAccepted {
		return a.body
	}
	var st struct {
		Status string
		Reason struct{ Message, Step string }
	}
	w.until("the end of a build", func() bool {
		a := w.ask("GET", "/templates/"+b.TemplateID+"/builds/"+b.BuildID+"/status?logsOffset=0", nil, "X-API-KEY", key)
		if a.status != http.StatusOK || json.Unmarshal([]byte(a.body), &st) != nil {
			w.t.Fatal(a)
		}
		return st.Status == "ready" || st.Status == "error"
	})
	if st.Status == "ready" {
		return ""
	}
	return st.Reason.Step + ": " + st.Reason.Message
}

// upload uploads a tar stream for a step.
func (w *world) upload(key string, b requested, hash string, data []byte) answer {
	w.t.Helper()
	var link struct {
		Present bool
		URL     string
	}
	if a := w.ask("GET", "/templates/"+b.TemplateID+"/files/"+hash, nil, "X-API-KEY", key); a.status != http.StatusCreated || json.Unmarshal([]byte(a.body), &link) != nil {
		return a
	}
	r, err := http.NewRequestWithContext(w.t.Context(), "PUT", link.URL, bytes.NewReader(data))
	if err != nil {
		w.t.Fatal(err)
	}
	return w.do(r)
}

func tarOf(files map[string]string) []byte {
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	for name, text := range files {
		_ = t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o644, Size: int64(len(text))})
		_, _ = t.Write([]byte(text))
	}
	_ = t.Close()
	return b.Bytes()
}

func TestTemplate_is_built_of_steps_and_its_sandboxes_begin_as_it_ended(t *testing.T) {
	w := begin(t, newGuests(t), nil)
	b := w.request(w.key, "mine:v1")
	if a := w.upload(w.key, b, "h1", tarOf(map[string]string{"src/a.txt": "copied"})); a.status != http.StatusOK {
		t.Fatal(a)
	}
	step := func(kind string, args ...string) map[string]any { return map[string]any{"type": kind, "args": args} }
	if why := w.build(w.key, b, map[string]any{"fromTemplate": "base", "startCmd": "sleep 1000", "readyCmd": "true", "steps": []any{
		step("ENV", "A", "a", "B", "$A/b"), step("WORKDIR", "/opt/work"), step("USER", "root"),
		map[string]any{"type": "COPY", "args": []string{"src/*", "in", "", "0600"}, "filesHash": "h1"},
		step("RUN", `test "$(cat in/a.txt)$B" = "copieda/b" && touch made`),
	}}); why != "" {
		t.Fatal(why)
	}
	m := w.create(map[string]any{"templateID": "mine:v1", "envVars": map[string]string{"A": "own"}})
	if md, err := w.host.State.Metadata(m.SandboxID); err != nil || md.E2B.User != "root" || md.E2B.Workdir != "/opt/work" || md.E2B.EnvVars["A"] != "own" || md.E2B.EnvVars["B"] != "a/b" {
		t.Error(md.E2B, err)
	}
	if out, _, _, err := w.run(m, `pwd; id -un; echo $A $B; stat -c %a in/a.txt; ls`); err != nil || out != "/opt/work\nroot\nown a/b\n600\nin\nmade\n" {
		t.Errorf("%q %v", out, err)
	}
	// The sandbox of the build is gone, and was never listed.
	w.until("one sandbox", func() bool {
		list, err := w.host.State.List()
		return err == nil && len(list) == 1
	})
	if a := w.ask("GET", "/snapshots", nil); strings.TrimSpace(a.body) != "[]" {
		t.Error("a template is among the snapshots:", a)
	}
	if a := w.ask("GET", "/v2/templates?limit=1", nil); !strings.Contains(a.body, b.TemplateID) || a.header.Get("X-Next-Token") == "" {
		t.Error("list:", a)
	}
}

func TestBuild_that_fails_says_at_which_step_and_leaves_nothing(t *testing.T) {
	w := begin(t, newGuests(t), nil)
	copyStep := map[string]any{"type": "COPY", "args": []string{"a", "b"}, "filesHash": "h"}
	for name, c := range map[string]struct {
		body map[string]any
		want string
	}{
		"a command":         {map[string]any{"steps": []any{map[string]any{"type": "RUN", "args": []string{"true"}}, map[string]any{"type": "RUN", "args": []string{"exit 3"}}}}, "2: failed to run command 'exit 3'"},
		"a user":            {map[string]any{"steps": []any{map[string]any{"type": "RUN", "args": []string{"whoami", "root123"}}}}, "1: failed to run command 'whoami': command failed: unauthenticated: invalid username: 'root123'"},
		"no upload":         {map[string]any{"steps": []any{copyStep}}, "1: COPY: the files of the step were not uploaded"},
		"no image":          {map[string]any{"fromTemplate": "", "fromImage": "docker.io/library/none:1"}, "base: the image none:1 is not on the host"},
		"no template":       {map[string]any{"fromTemplate": "none"}, "base: the template was not found"},
		"neither":           {map[string]any{"fromTemplate": ""}, "fromImage or fromTemplate"},
		"credentials":       {map[string]any{"fromImageRegistry": map[string]any{"type": "aws"}}, "fromImageRegistry"},
		"an unknown step":   {map[string]any{"steps": []any{map[string]any{"type": "VOLUME", "args": []string{"/a"}}}}, "VOLUME"},
		"an unknown field":  {map[string]any{"cmd": "x"}, "cmd"},
		"too few arguments": {map[string]any{"steps": []any{map[string]any{"type": "COPY", "args": []string{"a"}}}}, "too few args"},
	} {
		t.Run(name, func(t *testing.T) {
			body := map[string]any{"fromTemplate": "base"}
			maps.Copy(body, c.body)
			if why := w.build(w.key, w.request(w.key, "fails"), body); !strings.Contains(why, c.want) {
				t.Error(why)
			}
		})
	}
	if list, err := w.host.State.List(); err != nil || len(list) != 0 {
		t.Error(len(list), err)
	}
	if all, err := w.host.State.Snapshots(); err != nil || len(all) != 0 {
		t.Error(all, err)
	}
}

func TestTemplates_of_an_owner_are_that_owners_alone(t *testing.T) {
	w := begin(t, newGuests(t), nil)
	keys := map[string]string{}
	for _, owner := range []string{"ann", "bob"} {
		var err error
		if keys[owner], err = w.tokens.CreateE2B(tokens.Token{Name: owner, Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}, Owner: owner}); err != nil {
			t.Fatal(err)
		}
	}
	hers := w.request(keys["ann"], "shared-name")
	if a := w.upload(keys["bob"], hers, "h", nil); a.status != http.StatusNotFound {
		t.Error("another owner's upload:", a)
	}
	path := "/templates/" + hers.TemplateID + "/builds/" + hers.BuildID
	if a := w.ask("POST", "/v2"+path, map[string]any{"fromTemplate": "base"}, "X-API-KEY", keys["bob"]); a.status != http.StatusNotFound {
		t.Error("another owner's build:", a)
	}
	if a := w.ask("GET", path+"/status", nil, "X-API-KEY", keys["bob"]); a.status != http.StatusNotFound {
		t.Error("another owner's status:", a)
	}
	if why := w.build(keys["ann"], hers, map[string]any{"fromTemplate": "base"}); why != "" {
		t.Fatal(why)
	}
	his := w.request(keys["bob"], "shared-name")
	if his.TemplateID == hers.TemplateID {
		t.Error("two owners have one template")
	}
	if why := w.build(keys["bob"], his, map[string]any{"fromTemplate": "base"}); why != "" {
		t.Fatal(why)
	}
	nobodys := w.request(w.key, "shared-name")
	if nobodys.TemplateID == hers.TemplateID || nobodys.TemplateID == his.TemplateID {
		t.Error("a key without an owner has got an owner's template")
	}
	for _, route := range []string{"POST /v2/sandboxes", "DELETE /templates/ID", "GET /templates/ID/tags", "GET /templates/aliases/ID"} {
		method, at, _ := strings.Cut(strings.ReplaceAll(route, "ID", hers.TemplateID), " ")
		var body any
		if method == "POST" {
			body = map[string]any{"templateID": hers.TemplateID}
		}
		if a := w.ask(method, at, body, "X-API-KEY", keys["bob"]); a.status != http.StatusNotFound {
			t.Errorf("%s: %d %s", route, a.status, a.body)
		}
	}
	if a := w.ask("POST", "/templates/tags", map[string]any{"target": "shared-name", "tags": []string{"x"}}, "X-API-KEY", keys["bob"]); !strings.Contains(a.body, his.BuildID) {
		t.Error("tags:", a)
	}
	if a := w.ask("GET", "/templates", nil, "X-API-KEY", keys["bob"]); strings.Contains(a.body, hers.TemplateID) || !strings.Contains(a.body, his.TemplateID) {
		t.Error("list:", a)
	}
	if why := w.build(keys["ann"], w.request(keys["ann"], "pulled"), map[string]any{"fromImage": "python:3"}); !strings.Contains(why, "scope admin") {
		t.Error("a key that may not pull:", why)
	}
}

func TestUpload_is_bounded_and_needs_its_own_secret(t *testing.T) {
	w := begin(t, nil, nil)
	b := w.request(w.key, "t")
	for name, c := range map[string]struct {
		path   string
		length int64
		want   int
	}{
		"no secret": {"/templates/uploads/", 1, 404}, "a wrong one": {"/templates/uploads/" + strings.Repeat("a", 26), 1, 404}, "no length": {"/templates/uploads/x", -1, 411},
	} {
		r, err := http.NewRequestWithContext(t.Context(), "PUT", w.url+c.path, strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		if r.ContentLength = c.length; c.length < 0 {
			r.Body = io.NopCloser(strings.NewReader("x"))
		}
		if a := w.do(r); a.status != c.want {
			t.Errorf("%s: %d %s", name, a.status, a.body)
		}
	}
	if a := w.ask("GET", "/templates/none/files/h", nil); a.status != http.StatusNotFound {
		t.Error("of no template:", a)
	}
	var link struct{ URL string }
	if a := w.ask("GET", "/templates/"+b.TemplateID+"/files/h", nil); json.Unmarshal([]byte(a.body), &link) != nil {
		t.Fatal(a)
	}
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", strings.TrimPrefix(link.URL, w.url), 2<<30)
	line := make([]byte, 12)
	if _, err := conn.Read(line); err != nil || string(line) != "HTTP/1.1 413" {
		t.Errorf("%q %v", line, err)
	}
	if a := w.ask("POST", "/v3/templates", map[string]any{"name": "base"}); a.status != http.StatusConflict {
		t.Error("a template of the host:", a)
	}
	for _, body := range []map[string]any{
		{"name": "A b"}, {"name": strings.Repeat("a", 60)}, {"name": "a", "tags": []string{"x y"}}, {"name": "a", "cpuCount": 1000}, {"name": "a", "memoryMB": 1 << 20},
		{"name": "a", "minFreeDiskMb": 1 << 30}, {"name": "a", "public": true},
	} {
		if a := w.ask("POST", "/v3/templates", body); a.status != http.StatusBadRequest {
			t.Errorf("%v: %d %s", body, a.status, a.body)
		}
	}
	ann, err := w.tokens.CreateE2B(tokens.Token{Name: "ann", Scopes: tokens.Scopes{tokens.ScopeRead, tokens.ScopeExec, tokens.ScopeFiles, tokens.ScopeCreate}, Owner: "ann"})
	if err != nil {
		t.Fatal(err)
	}
	last := answer{status: http.StatusAccepted}
	n := 0
	for ; last.status == http.StatusAccepted && n < 300; n++ {
		last = w.ask("POST", "/v3/templates", map[string]any{"name": fmt.Sprint("t", n)}, "X-API-KEY", ann)
	}
	if last.status != http.StatusTooManyRequests || n != 33 {
		t.Errorf("builds of an owner: %d, %v", n, last)
	}
	if a := w.ask("POST", "/v3/templates", map[string]any{"name": "other"}); a.status != http.StatusAccepted {
		t.Error("an owner leaves no room for others:", a)
	}
}

func TestBuild_pulls_a_missing_image_for_a_key_with_the_scope_admin(t *testing.T) {
	var w *world
	var pulled []string
	w = begin(t, newGuests(t), func(o *e2b.Options) {
		o.Pull = func(ctx context.Context, ref string) error {
			pulled = append(pulled, ref)
			if ref != "python:3" {
				return errors.New("the registry has none")
			}
			images, err := image.OpenStore(o.Host.State.ImageDir())
			if err != nil {
				return err
			}
			return images.Tag(ctx, sandboxtest.Image, ref)
		}
	})
	for range 2 { // the second finds it
		if why := w.build(w.key, w.request(w.key, "pulls"), map[string]any{"fromImage": "docker.io/library/python:3"}); why != "" {
			t.Error(why)
		}
	}
	if why := w.build(w.key, w.request(w.key, "pulls"), map[string]any{"fromImage": "none:1"}); why != "base: the image none:1 could not be pulled: the registry has none" {
		t.Error(why)
	}
	if why := w.build(w.key, w.request(w.key, "pulls"), map[string]any{"fromImage": "../../etc"}); !strings.Contains(why, "is not the name of an image") {
		t.Error(why)
	}
	if !slices.Equal(pulled, []string{"python:3", "none:1"}) {
		t.Error(pulled)
	}
}
