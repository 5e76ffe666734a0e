package guesttest

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/template"
	"github.com/drowse-vm/drowse/vmm"
)

// templateDir, in the directory with images and kernels, has the templates of tests: a directory for each Spec, agent
// and state of the sources, in which the parts of a store are that a template needs.
const templateDir = "test-templates"

// templateTime is how long a template stays that no test uses.
const templateTime = 24 * time.Hour

// Template puts the template of a VM into the store. The first test that needs it makes it.
func (e *Env) Template(spec sandbox.Spec) {
	e.T.Helper()
	if template.Unsuited(spec) != "" || os.Geteuid() != 0 {
		return // it boots
	}
	spec = filled(spec)
	bare := template.Bare(spec, spec.Image, spec.Kernel)
	bare.Hostname = ""
	dir := filepath.Join(os.Getenv(StateEnv), templateDir)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		e.T.Fatal(err)
	}
	at := filepath.Join(dir, templateKey(e.T, bare, e.Launcher.Agent))
	lock, err := osfile.OpenLocked(e.T.Context(), at+".lock", os.O_CREATE|os.O_RDWR, 0o600, osfile.Exclusive)
	if err != nil {
		e.T.Fatal(err)
	}
	defer lock.Close()
	if !isThere(at) {
		e.makeTemplate(bare, dir, at)
	}
	now := time.Now()
	if err := os.Chtimes(at, now, now); err != nil {
		e.T.Error(err)
	}
	copyStore(e.T, at, e.Store.State.Dir())
}

// RemoveTemplates removes the templates of the store.
func (e *Env) RemoveTemplates() {
	e.T.Helper()
	list, _, err := e.Store.State.Templates().List()
	if err == nil {
		err = e.Store.State.RemoveTemplates(e.T.Context(), list...)
	}
	if err != nil {
		e.T.Fatal(err)
	}
}

func (e *Env) makeTemplate(bare sandbox.Spec, dir, at string) {
	e.T.Helper()
	tidyTemplates(dir)
	own := New(e.T)
	begin := time.Now()
	if _, err := own.Store.With(own.Launcher).MakeTemplates(e.T.Context(), bare); err != nil {
		e.T.Fatal(err)
	}
	e.T.Logf("made a template in %v", time.Since(begin).Round(time.Millisecond))
	temp := at + ".new"
	err := os.RemoveAll(temp)
	if err == nil {
		err = os.Mkdir(temp, 0o700)
	}
	if err != nil {
		e.T.Fatal(err)
	}
	copyStore(e.T, own.Store.State.Dir(), temp)
	if err := os.Rename(temp, at); err != nil {
		e.T.Fatal(err)
	}
}

// tidyTemplates removes what nobody has used for long.
func tidyTemplates(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, d := range entries {
		if i, err := d.Info(); err == nil && time.Since(i.ModTime()) > templateTime {
			_ = os.RemoveAll(filepath.Join(dir, d.Name()))
		}
	}
}

// templateKey names the template of a VM.
func templateKey(t testing.TB, bare sandbox.Spec, agent string) string {
	t.Helper()
	h := sha256.New()
	i, err := os.Stat(agent)
	if err == nil {
		// An emulated machine has the same files.
		kernel, _ := os.ReadFile("/proc/version")
		fmt.Fprintln(h, agent, i.Size(), i.ModTime().UnixNano(), sources(), vmm.SoftKVM(), string(kernel))
		err = json.NewEncoder(h).Encode(bare)
	}
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(h.Sum(nil))[:16]
}

// sources tells states of the module's sources apart.
var sources = sync.OnceValue(func() string {
	root, err := os.Getwd()
	for err == nil && !isThere(filepath.Join(root, "go.mod")) && root != "/" {
		root = filepath.Dir(root)
	}
	h := sha256.New()
	_ = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), "."), d.IsDir() && d.Name() == "bin":
			return fs.SkipDir
		case !strings.HasSuffix(path, ".go"), strings.HasSuffix(path, "_test.go"):
			return nil
		}
		if i, err := d.Info(); err == nil {
			fmt.Fprintln(h, path, i.Size(), i.ModTime().UnixNano())
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil))
})
