package blob_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/drowse-vm/drowse/sandbox/blob"
	"github.com/drowse-vm/drowse/sandbox/blob/blobtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestDir_is_a_store(t *testing.T) {
	blobtest.Test(t, blobtest.Options{}, func(t *testing.T) (s, other blob.Store) {
		dir := filepath.Join(t.TempDir(), "not", "yet")
		a, err := blob.OpenDir(dir)
		b, err2 := blob.OpenDir(dir)
		if err := errors.Join(err, err2); err != nil {
			t.Fatal(err)
		}
		return a, b
	})
}

func TestOpenDir_removes_what_a_killed_process_has_left_a_day_ago(t *testing.T) {
	root := t.TempDir()
	if _, err := blob.OpenDir(root); err != nil {
		t.Fatal(err)
	}
	old, young := filepath.Join(root, ".tmp", "old"), filepath.Join(root, ".tmp", "young")
	for _, f := range []string{old, young} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chtimes(old, time.Time{}, time.Now().Add(-25*time.Hour)); err != nil {
		t.Fatal(err)
	}
	if _, err := blob.OpenDir(root); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Error("the old one:", err)
	}
	if _, err := os.Stat(young); err != nil {
		t.Error("one that may be in use:", err)
	}
}
