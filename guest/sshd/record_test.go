package sshd_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/guest/audit"
)

func TestServe_sessions_are_recorded_as_asked_for_by_ssh(t *testing.T) {
	h := start(t)
	trail := audit.Path(h.guest.Path)
	if err := audit.Ensure(t.Context(), trail, audit.Head{VM: "0123", Name: "vm"}); err != nil {
		t.Fatal(err)
	}
	h.must(t, "", "ssh", "vm", "exit 0")
	dir := t.TempDir()
	batch := filepath.Join(dir, "batch")
	if err := os.WriteFile(batch, []byte("put "+batch+" "+dir+"/copied\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.must(t, "", "sftp", "-b", batch, "vm")
	var got []string
	if _, err := audit.Read(t.Context(), trail, audit.ReadOptions{}, func(e audit.Entry) error {
		got = append(got, fmt.Sprintf("%s by %s: %q login %v", e.Kind, e.Via, e.Argv, e.Login))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if want := []string{`exec by ssh: ["exit 0"] login true`, `sftp by ssh: [] login false`}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
