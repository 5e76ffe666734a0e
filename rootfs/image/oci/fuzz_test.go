package oci

import (
	"errors"
	"path"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
)

// FuzzDocuments reads indexes, manifests and configurations. Accepted documents keep the bounds.
func FuzzDocuments(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		want := v1.Platform{OS: "linux", Architecture: "amd64"}
		known := func(err error) {
			if !errors.Is(err, image.ErrBadManifest) && !errors.Is(err, image.ErrNoPlatform) && !errors.Is(err, image.ErrNoSource) {
				t.Fatalf("an error of another kind: %v", err)
			}
		}
		if ix, err := parseIndex(b); err != nil {
			known(err)
		} else {
			if _, err := choose(ix.Manifests, want); err != nil {
				known(err)
			}
			if _, err := chooseNamed(ix.Manifests, "v1", want); err != nil {
				known(err)
			}
		}
		if m, err := parseManifest(b); err != nil {
			known(err)
		} else if len(m.Layers) > layers.MaxLayers {
			t.Fatalf("%d layers", len(m.Layers))
		}
		m, diffs, err := parseConfig(b, want)
		if err != nil {
			known(err)
			return
		}
		if len(diffs) > layers.MaxLayers || len(m.run.Env) > 1024 || m.run.Workdir != "" && !path.IsAbs(m.run.Workdir) {
			t.Fatalf("%d layers, %+v", len(diffs), m.run)
		}
		for _, kv := range m.run.Env {
			if i := strings.IndexByte(kv, '='); i < 1 || strings.IndexByte(kv, 0) >= 0 {
				t.Fatalf("a variable %q", kv)
			}
		}
	})
}
