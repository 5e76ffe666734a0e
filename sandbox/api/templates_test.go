package api_test

import (
	"net/http/httptest"
	"path/filepath"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/client"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// asAll returns a client of a server of a host, with all rights.
func asAll(t *testing.T, h *sandbox.Host) *client.Client {
	t.Helper()
	file := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	secret, err := file.Create(tokens.Token{Name: "all", Scopes: tokens.All()})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(api.New(api.Options{Host: h, Tokens: file}))
	t.Cleanup(server.Close)
	return client.New(server.URL, secret, server.Client())
}

func TestTemplates_are_made_ahead_used_listed_and_removed(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	c := asAll(t, h)
	make := func(of wire.TemplateSpec) wire.Operation {
		t.Helper()
		o, err := c.MakeTemplate(t.Context(), of)
		for ; err == nil && o.State == "running"; o, err = c.Operation(t.Context(), o.ID) {
			time.Sleep(time.Millisecond)
		}
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	for name, of := range map[string]wire.TemplateSpec{"no image": {}, "a kernel by its path": {Image: sandboxtest.Image, Kernel: "/boot/vmlinuz"}} {
		if _, err := c.MakeTemplate(t.Context(), of); fleet.CodeOf(err) != "invalid" {
			t.Errorf("%s: %v", name, err)
		}
	}
	if o := make(wire.TemplateSpec{Image: "none"}); o.State != "failed" || o.Error == nil || o.Error.Code != "image-not-found" {
		t.Errorf("of an image that is not there: %+v", o)
	}
	o := make(wire.TemplateSpec{Image: sandboxtest.Image, MemoryMiB: 256})
	if o.State != "done" || len(o.Template) != 64 {
		t.Fatalf("%+v, %+v", o, o.Error)
	}
	if again := make(wire.TemplateSpec{Image: sandboxtest.Image, MemoryMiB: 256}); again.Template != o.Template {
		t.Errorf("again: %+v", again)
	}
	create := func(name string, memory int, boot bool) string {
		t.Helper()
		if _, err := c.Create(t.Context(), records.Request{Spec: spec.VM{Name: name, Image: sandboxtest.Image, MemoryMiB: memory}, Boot: boot}); err != nil {
			t.Fatal(err)
		}
		r, err := h.State.Get(name)
		if err != nil {
			t.Fatal(err)
		}
		return r.Template
	}
	ready, err := h.State.Templates().Find(o.Template)
	if err != nil {
		t.Fatal(err)
	}
	if from := create("a", 256, false); from == "" || from != ready.Snapshot {
		t.Errorf("the sandbox is from template %q", from)
	}
	if from := create("c", 256, true); from != "" {
		t.Errorf("one that is to boot is from template %q", from)
	}
	if from := create("b", 512, false); from != "" {
		t.Errorf("one of another size is from template %q", from)
	}
	list, err := c.Templates(t.Context())
	states := map[int]string{}
	for _, one := range list {
		states[one.MemoryMiB] = one.State
	}
	if err != nil || len(list) != 2 || states[256] != "ready" || states[512] != "wanted" {
		t.Errorf("%+v, %v", list, err)
	}
	if err := c.RemoveTemplate(t.Context(), o.Template[:8]); err != nil {
		t.Error(err)
	}
	if err := c.RemoveTemplate(t.Context(), o.Template); fleet.CodeOf(err) != "not-found" {
		t.Errorf("removed twice: %v", err)
	}
	if list, err := c.Templates(t.Context()); err != nil || len(list) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if _, err := h.Sandbox("a").Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Errorf("a sandbox whose template is gone: %v", err)
	}
}

func TestGateway_of_a_sandbox_changes_and_no_old_token_comes_back(t *testing.T) {
	h := (&sandboxtest.VMs{}).Host(t)
	c := asAll(t, h)
	if _, err := h.Create(t.Context(), sandbox.Spec{Name: "a", Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	is := func(when string, want wire.Gateway, fresh bool) {
		t.Helper()
		got, err := c.Sandbox("a").Gateway(t.Context())
		if err != nil || len(got.PublicPorts) != len(want.PublicPorts) || got.AllPublic != want.AllPublic || got.Host != want.Host || got.IdleStreams != want.IdleStreams || got.Token == "" {
			t.Errorf("%s: %+v, %v, want %+v", when, got, err, want)
		}
		if seen[got.Token] == fresh {
			t.Errorf("%s: token %q is new: %v, want %v", when, got.Token, !fresh, fresh)
		}
		seen[got.Token] = true
	}
	change := func(ch records.Changes, code records.Code) {
		t.Helper()
		if _, err := c.Update(t.Context(), "a", ch); (err == nil) != (code == "") || err != nil && fleet.CodeOf(err) != code {
			t.Errorf("%+v: %v, want %q", ch, err, code)
		}
	}
	is("at first", wire.Gateway{}, true)
	open := spec.Gateway{PublicPorts: []uint16{80, 3000}, Host: "localhost:${PORT}", IdleStreams: true}
	change(records.Changes{Gateway: &open}, "")
	is("opened", wire.GatewayOf(open), false)
	purpose := "p"
	change(records.Changes{Purpose: &purpose, NewGatewayToken: true}, "")
	is("with a new token", wire.GatewayOf(open), true)
	change(records.Changes{Gateway: &spec.Gateway{PublicPorts: []uint16{0}}}, "metadata")
	change(records.Changes{Gateway: &spec.Gateway{Host: "a/b"}}, "metadata")
	is("refused", wire.GatewayOf(open), false)
	// Neither other settings nor a reset make the first token valid again.
	change(records.Changes{Gateway: &spec.Gateway{AllPublic: true}}, "")
	m, err := h.State.Metadata("a")
	if err != nil || m.Gateway.Tokens != 1 || !m.Gateway.AllPublic || len(m.Gateway.PublicPorts) != 0 || m.Purpose != "p" {
		t.Errorf("%+v, %v", m, err)
	}
	change(records.Changes{Reset: true}, "")
	is("reset", wire.Gateway{}, false)
	if m, err := h.State.Metadata("a"); err != nil || m.Gateway.Tokens != 1 {
		t.Errorf("%+v, %v", m, err)
	}
	if _, err := c.Sandbox("none").Gateway(t.Context()); fleet.CodeOf(err) != "not-found" {
		t.Errorf("of none: %v", err)
	}
}
