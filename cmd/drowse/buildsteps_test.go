//go:build linux

package main

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/image/drowsefile"
	"github.com/drowse-vm/drowse/sandbox/e2b/interpreter"
)

func TestFlags_that_do_not_go_together_are_usage_errors(t *testing.T) {
	state := t.TempDir()
	file := filepath.Join(t.TempDir(), "Drowsefile")
	if err := os.WriteFile(file, []byte("FROM scratch\nVOLUME /x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DROWSE_AGENT", file) // any file, since no VM boots
	for name, tt := range map[string]struct {
		args []string
		want string
	}{
		"build from nothing":            {[]string{"image", "build"}, "no source given"},
		"steps and a source":            {[]string{"image", "build", "--file", file, "--from", "dir:/", "--tag", "t"}, "--from does not go with --file"},
		"steps without a tag":           {[]string{"image", "build", "--file", file}, "use --tag"},
		"context without steps":         {[]string{"image", "build", "--from", "dir:/", "--context", "."}, "--context goes with --file only"},
		"network without steps":         {[]string{"image", "build", "--from", "dir:/", "--net", "tap"}, "--net goes with --file only"},
		"argument without a name":       {[]string{"image", "build", "--file", file, "--tag", "t", "--build-arg", "=x"}, "use NAME=VALUE"},
		"argument of no variable":       {[]string{"image", "build", "--file", file, "--tag", "t", "--build-arg", "NOT_THERE_AT_ALL"}, "no such variable"},
		"instruction that is not known": {[]string{"image", "build", "--file", file, "--tag", "t"}, "line 2: VOLUME: this instruction is not supported"},
		"recipe that is not there":      {[]string{"image", "build", "--recipe", "pie"}, "there is only code-interpreter"},
		"recipe and steps":              {[]string{"image", "build", "--recipe", "code-interpreter", "--file", file}, "--file does not go with --recipe"},
		"recipe and a source":           {[]string{"image", "build", "--recipe", "code-interpreter", "--from", "dir:/"}, "--from does not go with --recipe"},
		"recipe and a directory":        {[]string{"image", "build", "--recipe", "code-interpreter", "--context", "."}, "--context does not go with --recipe"},
		"run detached and removed":      {[]string{"run", "--rm", "-d", "a", "sh"}, "--rm does not go with --detach"},
		"run of an entrypoint alone":    {[]string{"run", "--entrypoint", "sh", "--no-image-config", "a"}, "does not go with --no-image-config"},
		"run of nothing":                {[]string{"run"}, "no image is named"},
	} {
		t.Run(name, func(t *testing.T) {
			code, stdout, stderr := drowse(t, state, tt.args...)
			if code != exitUsage || stdout != "" || !strings.Contains(stderr, tt.want) || strings.Count(stderr, "\n") != 1 {
				t.Errorf("exit status %d, stdout %q, stderr %q; want %d and %q", code, stdout, stderr, exitUsage, tt.want)
			}
		})
	}
}

func TestRecipe_is_a_build_file_and_all_that_it_copies(t *testing.T) {
	f := stepFlags{recipe: interpreter.Tag}
	o := builder.Options{Include: []string{"jq"}}
	done, err := f.useRecipe(&cobra.Command{}, &o)
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(f.file)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := drowsefile.Parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(parsed.Instructions) < 3 || o.Tag != interpreter.Tag || !slices.Equal(o.Include, []string{interpreter.Packages, "jq"}) {
		t.Errorf("%+v, %+v", parsed, o)
	}
	for _, m := range regexp.MustCompile(`(?m)^COPY .*?([^ ]+) /`).FindAllStringSubmatch(string(text), -1) {
		if st, err := os.Stat(filepath.Join(filepath.Dir(f.file), m[1])); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", m[1], err)
		}
	}
	if err := done(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(f.file); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it is left: %v", err)
	}
}

// A build without commands boots no VM.
func TestImage_of_steps_without_commands(t *testing.T) {
	state, dir := t.TempDir(), t.TempDir()
	file := filepath.Join(dir, "Drowsefile")
	for name, text := range map[string]string{"Drowsefile": "ARG V=1\nFROM scratch\nARG V\nCOPY f /d/\nCMD [\"/d/f\", \"$V\"]\nLABEL v=$V\n", "f": "text"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("DROWSE_AGENT", file)
	t.Setenv("V", "2")
	code, stdout, stderr := drowse(t, state, "image", "build", "--file", file, "--tag", "t", "--build-arg", "V", "-o", "json")
	if code != 0 || !strings.Contains(stdout, `"boots": 0`) || !strings.Contains(stdout, `"v": "2"`) || !strings.Contains(stderr, "[1/1] COPY f /d/") {
		t.Fatalf("exit status %d, stdout %s, stderr %s", code, stdout, stderr)
	}
	code, stdout, stderr = drowse(t, state, "image", "build", "--file", file, "--tag", "u", "--build-arg", "V=2")
	if code != 0 || !strings.HasPrefix(stdout, "t:latest u:latest ") || !strings.Contains(stderr, "cached") {
		t.Errorf("the same again: exit status %d, stdout %s, stderr %s", code, stdout, stderr)
	}
	s, err := image.OpenStore(state)
	if err != nil {
		t.Fatal(err)
	}
	img, err := s.Find("t")
	if err != nil || !slices.Equal(img.Cmd, []string{"/d/f", "$V"}) {
		t.Errorf("the image is %+v (%v)", img, err)
	}
	// An image without a command fails before a boot.
	if err := os.WriteFile(file, []byte("FROM scratch\nLABEL a=b\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, _, stderr = drowse(t, state, "image", "build", "--file", file, "--tag", "mute"); code != 0 {
		t.Fatal(stderr)
	}
	if code, _, stderr = drowse(t, state, "run", "mute"); code == 0 || !strings.Contains(stderr, "no entrypoint and no command") {
		t.Errorf("exit status %d, %s", code, stderr)
	}
	if code, stdout, stderr = drowse(t, state, "image", "prune"); code != 0 || !strings.Contains(stdout, "0 results of steps") {
		t.Errorf("pruning: exit status %d, %s%s", code, stdout, stderr)
	}
	for _, tag := range []string{"t", "u"} {
		if code, _, stderr = drowse(t, state, "image", "rm", tag); code != 0 {
			t.Fatal(stderr)
		}
	}
	if code, stdout, stderr = drowse(t, state, "image", "prune"); code != 0 || !strings.Contains(stdout, "1 results of steps") {
		t.Errorf("pruning afterwards: exit status %d, %s%s", code, stdout, stderr)
	}
}

func TestLine_writer_passes_on_whole_lines_without_commands_for_a_terminal(t *testing.T) {
	for name, tt := range map[string]struct {
		in   []string
		want string
	}{
		"pieces of a line":    {[]string{"a", "b\nc"}, "ab\nc\n"},
		"empty lines":         {[]string{"\n\na\n"}, "\n\na\n"},
		"a line drawn anew":   {[]string{"1%\r2%\r\ndone"}, "1%\n2%\ndone\n"},
		"commands":            {[]string{"\x1b[2Jx\n"}, "\uFFFD[2Jx\n"},
		"a line without end":  {[]string{strings.Repeat("x", maxLine+3)}, strings.Repeat("x", maxLine) + "\nxxx\n"},
		"exactly as long":     {[]string{strings.Repeat("x", maxLine) + "\ny\n"}, strings.Repeat("x", maxLine) + "\ny\n"},
		"nothing":             {nil, ""},
		"an end between them": {[]string{"a\n", "\nb"}, "a\n\nb\n"},
	} {
		t.Run(name, func(t *testing.T) {
			var b strings.Builder
			l := &lineWriter{w: &b}
			for _, s := range tt.in {
				if n, err := l.Write([]byte(s)); n != len(s) || err != nil {
					t.Fatal(n, err)
				}
			}
			l.end()
			if b.String() != tt.want {
				t.Errorf("passed on is %q, want %q", b.String(), tt.want)
			}
		})
	}
}
