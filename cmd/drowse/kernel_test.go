//go:build linux

package main

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// putKernel puts a kernel into a state directory and returns the kernel's own directory.
func putKernel(t *testing.T, state, id, kind, config string, inputs map[string]string) string {
	t.Helper()
	dir := filepath.Join(state, "kernels", id)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	record, err := json.Marshal(map[string]any{
		"format_version": 1, "id": id, "kind": kind, "version": "6.1.9", "arch": "amd64", "image": "vmlinux", "image_size": 6,
		"image_sha256": fmt.Sprintf("%x", sha256.Sum256([]byte("kernel"))), "config": "config", "created": "2026-01-02T03:04:05Z", "inputs": inputs,
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"kernel.json": string(record), "vmlinux": "kernel", "config": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestKernel_inspect_says_what_a_kernel_has_and_lacks(t *testing.T) {
	state := t.TempDir()
	putKernel(t, state, "built-6.1.9-aaaa", "built", "CONFIG_TUN=y\n", map[string]string{"source": "linux-source 6.1.9-1 deb sha256:0123"})
	dir := putKernel(t, state, "debian-6.1.9-bbbb", "debian", "CONFIG_TUN=m\nCONFIG_SWAP=y\n", nil)
	putKernel(t, state, "built-6.1.9-cccc", "built", "CONFIG_TUN=y\nCONFIG_SWAP=y\n", map[string]string{"own options": "x"})
	for _, c := range []struct {
		kernel string
		want   []string // regular expressions
	}{
		{"built-6.1.9-aaaa", []string{`(?m)^version +6\.1\.9$`, `(?m)^runs on KVM +hardware, soft$`, `(?m)^source +linux-source 6\.1\.9-1 deb sha256:0123$`, `(?m)^tun +yes `, `(?m)^swap +no .* CONFIG_SWAP$`}},
		{"debian", []string{`(?m)^runs on KVM +hardware$`, `(?m)^tun +module .* --module tun$`, `(?m)^swap +yes `}},
		{"built-6.1.9-c", []string{`(?m)^kind +built, own options$`, `(?m)^swap +yes `}},
	} {
		code, stdout, stderr := drowse(t, state, "kernel", "inspect", c.kernel)
		if code != 0 || stderr != "" {
			t.Fatalf("%s: exit status %d, %s", c.kernel, code, stderr)
		}
		for _, want := range c.want {
			if !regexp.MustCompile(want).MatchString(stdout) {
				t.Errorf("%s: %q is not in\n%s", c.kernel, want, stdout)
			}
		}
	}
	code, stdout, _ := drowse(t, state, "kernel", "inspect", "debian", "-o", "json")
	var got struct {
		ID       string   `json:"id"`
		Hosts    []string `json:"hosts"`
		Own      bool     `json:"own"`
		Lacks    []string `json:"lacks"`
		Features []struct {
			Name, Has, Purpose string
			Options            map[string]string
		} `json:"features"`
	}
	if decode(t, stdout, &got); code != 0 || got.ID != "debian-6.1.9-bbbb" || len(got.Hosts) != 1 || got.Hosts[0] != "hardware" || got.Own {
		t.Errorf("exit status %d: %+v", code, got)
	}
	lacks := " " + strings.Join(got.Lacks, " ") + " "
	for _, f := range got.Features {
		if missing := f.Has != "yes"; missing != strings.Contains(lacks, " "+f.Name+" ") {
			t.Errorf("%s is %q, and lacks has %q", f.Name, f.Has, lacks)
		}
		if f.Name == "tun" && (f.Has != "module" || f.Options["CONFIG_TUN"] != "module" || f.Purpose == "") {
			t.Errorf("tun: %+v", f)
		}
	}
	if code, stdout, _ := drowse(t, state, "kernel", "ls"); code != 0 || !strings.Contains(stdout, "built, own options") || !strings.Contains(stdout, "hardware, soft") {
		t.Errorf("exit status %d:\n%s", code, stdout)
	}
	if err := os.WriteFile(filepath.Join(dir, "vmlinux"), []byte("Kernel"), 0o644); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := drowse(t, state, "kernel", "inspect", "debian"); code != exitFailed || stdout != "" || !strings.Contains(stderr, "damaged kernel") {
		t.Errorf("one that is not as it was published: %d, %q, %q", code, stdout, stderr)
	}
}
