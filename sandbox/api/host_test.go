package api_test

import (
	"encoding/json"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/sandboxtest"
)

func TestHost_counts_sandboxes_by_status_and_measures_memory_and_disk(t *testing.T) {
	m := newMachines(t)
	for _, name := range []string{"a", "b", "c"} {
		if _, err := m.host.Create(t.Context(), sandbox.Spec{Name: name, Image: sandboxtest.Image}, sandbox.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := m.host.Sandbox("b").Sleep(t.Context(), sandbox.SleepOptions{}); err != nil {
		t.Fatal(err)
	}
	known := tokens.Open(filepath.Join(t.TempDir(), tokens.File))
	secret, err := known.Create(tokens.Token{Name: "reader", Scopes: tokens.Scopes{tokens.ScopeRead}})
	if err != nil {
		t.Fatal(err)
	}
	resolver := netip.MustParseAddrPort("192.0.2.53:53")
	ask := asker(t, api.New(api.Options{Host: m.host, Tokens: known, Resolvers: []netip.AddrPort{resolver}}), secret)
	code, text := ask("GET", "/v1/host", "")
	var is wire.Host
	if err := json.Unmarshal([]byte(text), &is); err != nil || code != 200 {
		t.Fatalf("%d %s (%v)", code, text, err)
	}
	if is.Sandboxes[records.Running] != 2 || is.Sandboxes[records.Asleep] != 1 || len(is.Resolvers) != 1 || is.Resolvers[0] != resolver {
		t.Errorf("it says %s", text)
	}
	if is.MemoryTotal <= 0 || is.MemoryAvailable > is.MemoryTotal || is.AwakeMemoryMost <= 0 || is.DiskTotal <= 0 || is.DiskFree > is.DiskTotal {
		t.Errorf("it measures %+v", is.Capacity)
	}
}
