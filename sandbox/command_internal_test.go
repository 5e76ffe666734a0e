package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/sandbox/state"
)

func TestCommand_image_fills_what_the_caller_left_out(t *testing.T) {
	c := image.RunConfig{Env: []string{"PATH=/opt/bin", "A=1"}, User: "app:www", Workdir: "/srv", Entrypoint: []string{"/init"}}
	for name, tt := range map[string]struct {
		cmd  guest.Cmd
		c    image.RunConfig
		user string
		dir  string
		env  []string
	}{
		"all from the image":        {guest.Cmd{}, c, "app:www", "/srv", []string{"PATH=/opt/bin", "A=1"}},
		"the caller's come last":    {guest.Cmd{Env: []string{"A=2", "B=3"}}, c, "app:www", "/srv", []string{"PATH=/opt/bin", "A=1", "A=2", "B=3"}},
		"user and directory given":  {guest.Cmd{User: "root", Dir: "/"}, c, "root", "/", []string{"PATH=/opt/bin", "A=1"}},
		"an environment of its own": {guest.Cmd{ReplaceEnv: true, Env: []string{"X=1"}}, c, "app:www", "/srv", []string{"X=1"}},
		"an image that is silent":   {guest.Cmd{Env: []string{"X=1"}}, image.RunConfig{}, "", "", []string{"X=1"}},
	} {
		t.Run(name, func(t *testing.T) {
			tt.cmd.Argv = []string{"true"}
			got := withConfig(tt.cmd, tt.c)
			if got.User != tt.user || got.Dir != tt.dir || !slices.Equal(got.Env, tt.env) || !slices.Equal(got.Argv, []string{"true"}) {
				t.Errorf("got %+v", got)
			}
		})
	}
	if !slices.Equal(c.Env, []string{"PATH=/opt/bin", "A=1"}) {
		t.Error("the image's list was changed")
	}
}

func TestCommand_reads_the_image_of_the_record(t *testing.T) {
	s, err := Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	tree := t.TempDir()
	if err := os.WriteFile(filepath.Join(tree, "f"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		t.Fatal(err)
	}
	img, err := builder.Build(t.Context(), builder.Options{Store: images, From: "dir:" + tree})
	if err != nil {
		t.Fatal(err)
	}
	r := &state.Record{Version: state.RecordVersion, ID: spec.NewID(), Spec: Spec{Name: "vm"}, Phase: state.Stopped, Boot: state.BootFiles{ImageID: img.ID}}
	l, err := s.State.Create(r)
	if err != nil {
		t.Fatal(err)
	}
	l.Release()
	cmd := guest.Cmd{Argv: []string{"true"}, Env: []string{"A=1"}}
	if got, err := s.Sandbox("vm").Command(cmd); err != nil || got.User != "" || got.Dir != "" || !slices.Equal(got.Env, cmd.Env) {
		t.Errorf("with an image that says nothing: %+v (%v)", got, err)
	}
	if _, err := s.Sandbox("other").Command(cmd); !errors.Is(err, ErrNotFound) {
		t.Errorf("without a VM: %v", err)
	}
	if err := os.RemoveAll(filepath.Dir(img.Path())); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sandbox("vm").Command(cmd); !errors.Is(err, image.ErrNotFound) {
		t.Errorf("without the image: %v", err)
	}
}

func TestMainArgv_is_entrypoint_and_arguments(t *testing.T) {
	for name, tt := range map[string]struct {
		entrypoint, cmd, args, want []string
	}{
		"both of the image":             {[]string{"/e", "-x"}, []string{"c"}, nil, []string{"/e", "-x", "c"}},
		"arguments replace its command": {[]string{"/e"}, []string{"c"}, []string{"a", "b"}, []string{"/e", "a", "b"}},
		"without an entrypoint":         {nil, []string{"c", "d"}, nil, []string{"c", "d"}},
		"only arguments":                {nil, nil, []string{"a"}, []string{"a"}},
		"nothing":                       {nil, nil, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := image.RunConfig{Entrypoint: tt.entrypoint, Cmd: tt.cmd}.Argv(tt.args)
			if (tt.want == nil) != errors.Is(err, image.ErrNoEntrypoint) || !slices.Equal(got, tt.want) {
				t.Errorf("got %q (%v)", got, err)
			}
		})
	}
}
