//go:build linux

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestArchive_says_what_is_wrong_with_its_name(t *testing.T) {
	t.Setenv(archiveVariable, "")
	empty, missing := t.TempDir(), filepath.Join(t.TempDir(), "misspelt")
	for name, tt := range map[string]struct {
		args []string
		code int
		says string
	}{
		"none":                     {[]string{"archive", "ls"}, 2, archiveVariable},
		"another scheme":           {[]string{"archive", "ls", "--in", "gs://bucket"}, 2, "s3://BUCKET"},
		"keys in it":               {[]string{"archive", "ls", "--in", "s3://key:hidden@bucket"}, 2, "AWS_ACCESS_KEY_ID"},
		"a directory in a file":    {[]string{"archive", "ls", "--in", "/dev/null/x"}, 1, "not a directory"},
		"a directory not there":    {[]string{"archive", "ls", "--in", missing}, 1, "there is no archive"},
		"a snapshot not in it":     {[]string{"archive", "rm", "0123", "--in", empty}, 1, "does not have it"},
		"a snapshot not there":     {[]string{"archive", "push", "0123", "--in", filepath.Join(t.TempDir(), "b")}, 1, "0123"},
		"a snapshot not to be had": {[]string{"archive", "pull", strings.Repeat("0", 32), "--in", empty}, 1, "does not have it"},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := drowse(t, t.TempDir(), tt.args...)
			if code != tt.code || stdout != "" || !strings.Contains(stderr, tt.says) || strings.Contains(stderr, "hidden") {
				t.Errorf("exit status %d, stdout %q, stderr %q", code, stdout, stderr)
			}
		})
	}
	if _, err := os.Stat(missing); err == nil {
		t.Error("a misspelt directory was made")
	}
	t.Setenv(archiveVariable, empty)
	if code, stdout, stderr := drowse(t, t.TempDir(), "archive", "ls", "-o", "json"); code != 0 || strings.TrimSpace(stdout) != "[]" || stderr != "" {
		t.Errorf("an empty one: %d, %q, %q", code, stdout, stderr)
	}
}
