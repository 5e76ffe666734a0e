package oci

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
)

// Limits of the documents of an image.
const (
	maxManifestBytes = 4 << 20 // of an index, a manifest or a configuration; registries accept 4 MiB
	maxIndexEntries  = 4096
	maxIndexDepth    = 4 // indexes in indexes
)

// Platform is what an image runs on.
type Platform = v1.Platform

// manifest is the checked content of an image's documents.
type manifest struct {
	digest   string // of the manifest; "" in an archive of docker
	config   string // digest of the configuration
	platform string
	arch     string
	run      image.RunConfig
	layers   []layers.Source // the lowest first
}

// Identity identifies everything that decides the content of the image.
func (m *manifest) Identity() string { return m.digest + " " + m.config }

// fetcher returns the document of a descriptor, unchecked.
type fetcher func(v1.Descriptor) ([]byte, error)

// document fetches the document of a descriptor and checks size and digest.
func (get fetcher) document(d v1.Descriptor) ([]byte, error) {
	if d.Size < 0 || d.Size > maxManifestBytes {
		return nil, fmt.Errorf("%w: the descriptor of %s says that it has %d bytes, at most %d are possible",
			image.ErrBadManifest, d.Digest, d.Size, maxManifestBytes)
	}
	b, err := get(d)
	if err != nil {
		return nil, err
	}
	if int64(len(b)) != d.Size {
		return nil, fmt.Errorf("%w: %s has %d bytes, its descriptor says %d", image.ErrDigest, d.Digest, len(b), d.Size)
	}
	v, err := layers.NewVerifier(d.Digest.String())
	if err != nil {
		return nil, err
	}
	v.Write(b)
	return b, v.Check()
}

// ParsePlatform reads OS/ARCH or OS/ARCH/VARIANT; "" means this program's platform.
func ParsePlatform(s string) (v1.Platform, error) {
	if s == "" {
		return v1.Platform{OS: "linux", Architecture: runtime.GOARCH}, nil
	}
	part := strings.Split(s, "/")
	if len(part) < 2 || len(part) > 3 || slices.Contains(part, "") || len(s) > 100 {
		return v1.Platform{}, fmt.Errorf("%w: %q is no platform; use one such as linux/amd64", image.ErrInvalidOption, s)
	}
	if part[0] != "linux" {
		return v1.Platform{}, fmt.Errorf("%w: platform %q: VMs run linux only", image.ErrInvalidOption, s)
	}
	p := v1.Platform{OS: part[0], Architecture: part[1]}
	if len(part) == 3 {
		p.Variant = part[2]
	}
	return p, nil
}

// parseJSON reads one JSON document.
func parseJSON(what string, b []byte, v any) error {
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("%w: its %s: %w", image.ErrBadManifest, what, err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: its %s: there is more after the JSON document", image.ErrBadManifest, what)
	}
	return nil
}

// parseIndex reads an index and checks its bounds.
func parseIndex(b []byte) (*v1.IndexManifest, error) {
	var kind struct {
		Layers, Config json.RawMessage
	}
	if err := parseJSON("index", b, &kind); err != nil {
		return nil, err
	}
	if kind.Layers != nil || kind.Config != nil {
		return nil, fmt.Errorf("%w: it is an index and a manifest at once", image.ErrBadManifest)
	}
	var ix v1.IndexManifest
	if err := parseJSON("index", b, &ix); err != nil {
		return nil, err
	}
	if len(ix.Manifests) > maxIndexEntries {
		return nil, fmt.Errorf("%w: its index has %d entries, at most %d are possible", image.ErrBadManifest, len(ix.Manifests), maxIndexEntries)
	}
	if ix.SchemaVersion != 2 {
		return nil, fmt.Errorf("%w: its index has schema version %d, known is 2", image.ErrBadManifest, ix.SchemaVersion)
	}
	return &ix, nil
}

// descend follows indexes from a descriptor to the platform's manifest. It returns that document too.
func (get fetcher) descend(d v1.Descriptor, want v1.Platform) (v1.Descriptor, []byte, error) {
	for range maxIndexDepth {
		b, err := get.document(d)
		if err != nil {
			return d, nil, err
		}
		switch {
		case d.MediaType.IsIndex():
			ix, err := parseIndex(b)
			if err != nil {
				return d, nil, err
			}
			if d, err = choose(ix.Manifests, want); err != nil {
				return d, nil, err
			}
		case d.MediaType.IsImage():
			return d, b, nil
		default:
			return d, nil, fmt.Errorf("%w: %s is of type %q, which is no image", image.ErrBadManifest, d.Digest, d.MediaType)
		}
	}
	return d, nil, fmt.Errorf("%w: more than %d indexes lie in each other", image.ErrBadManifest, maxIndexDepth)
}

// choose returns the entry of an index for a platform.
func choose(list []v1.Descriptor, want v1.Platform) (v1.Descriptor, error) {
	var have []string
	var silent []v1.Descriptor // those without a platform
	for _, d := range list {
		switch {
		case !d.MediaType.IsIndex() && !d.MediaType.IsImage():
		case d.Annotations["vnd.docker.reference.type"] != "": // attestations of BuildKit
		case d.Platform == nil || d.Platform.OS == "" && d.Platform.Architecture == "":
			silent = append(silent, d)
		case d.Platform.Satisfies(want):
			return d, nil
		default:
			have = append(have, d.Platform.String())
		}
	}
	if len(silent) == 1 && len(have) == 0 {
		return silent[0], nil // its configuration has the platform
	}
	if len(have) > 20 {
		have = append(have[:20], "...")
	}
	return v1.Descriptor{}, fmt.Errorf("%w: it is not there for %s, only for %q; choose with --platform", image.ErrNoPlatform, want, have)
}

// parseManifest reads a manifest.
func parseManifest(b []byte) (*v1.Manifest, error) {
	var kind struct{ Manifests json.RawMessage }
	if err := parseJSON("manifest", b, &kind); err != nil {
		return nil, err
	}
	if kind.Manifests != nil {
		return nil, fmt.Errorf("%w: it is an index and a manifest at once", image.ErrBadManifest)
	}
	var m v1.Manifest
	if err := parseJSON("manifest", b, &m); err != nil {
		return nil, err
	}
	if m.SchemaVersion != 2 {
		return nil, fmt.Errorf("%w: it has schema version %d, known is 2", image.ErrBadManifest, m.SchemaVersion)
	}
	if !m.Config.MediaType.IsConfig() {
		return nil, fmt.Errorf("%w: its configuration is of type %.100q: it is an artifact, no image", image.ErrBadManifest, m.Config.MediaType)
	}
	return &m, checkLayerCount(len(m.Layers))
}

func checkLayerCount(n int) error {
	if n > layers.MaxLayers {
		return fmt.Errorf("%w: it has %d layers, at most %d are possible", image.ErrBadManifest, n, layers.MaxLayers)
	}
	return nil
}

// dockerLayerZstd is BuildKit's media type of a zstd layer in a docker manifest.
const dockerLayerZstd = types.MediaType("application/vnd.docker.image.rootfs.diff.tar.zstd")

// checkLayerType refuses what is not a freely available layer of a root filesystem.
func checkLayerType(t types.MediaType) error {
	switch t {
	case types.OCILayer, types.OCILayerZStd, types.OCIUncompressedLayer, types.DockerLayer, types.DockerUncompressedLayer, dockerLayerZstd:
		return nil
	}
	if !t.IsDistributable() {
		return fmt.Errorf("%w: a layer is of type %.100q, which may not be distributed", image.ErrBadManifest, t)
	}
	return fmt.Errorf("%w: a layer is of type %.100q, which is not known", image.ErrBadManifest, t)
}

// image reads the manifest and configuration of a descriptor. blob opens a layer.
func (get fetcher) image(d v1.Descriptor, want v1.Platform, blob func(context.Context, v1.Descriptor) (io.ReadCloser, error)) (*manifest, error) {
	d, b, err := get.descend(d, want)
	if err != nil {
		return nil, err
	}
	doc, err := parseManifest(b)
	if err != nil {
		return nil, err
	}
	cb, err := get.document(doc.Config)
	if err != nil {
		return nil, fmt.Errorf("read its configuration: %w", err)
	}
	m, diffs, err := parseConfig(cb, want)
	if err != nil {
		return nil, err
	}
	if len(diffs) != len(doc.Layers) {
		return nil, fmt.Errorf("%w: it has %d layers, its configuration tells of %d", image.ErrBadManifest, len(doc.Layers), len(diffs))
	}
	m.digest, m.config = d.Digest.String(), doc.Config.Digest.String()
	for i, l := range doc.Layers {
		if err := checkLayerType(l.MediaType); err != nil {
			return nil, err
		}
		if l.Size < 0 {
			return nil, fmt.Errorf("%w: a layer has %d bytes", image.ErrBadManifest, l.Size)
		}
		m.layers = append(m.layers, layers.Source{
			Layer: image.Layer{Digest: l.Digest.String(), DiffID: diffs[i].String(), MediaType: string(l.MediaType), Size: l.Size},
			Open:  func(ctx context.Context) (io.ReadCloser, error) { return blob(ctx, l) },
		})
	}
	return m, nil
}

// parseConfig reads a configuration and returns the digests of the layers' tar streams.
func parseConfig(b []byte, want v1.Platform) (*manifest, []v1.Hash, error) {
	var c v1.ConfigFile
	if err := parseJSON("configuration", b, &c); err != nil {
		return nil, nil, err
	}
	have := v1.Platform{OS: c.OS, Architecture: c.Architecture, Variant: c.Variant}
	// Configurations often leave out the variant.
	if !have.Satisfies(v1.Platform{OS: want.OS, Architecture: want.Architecture}) {
		return nil, nil, fmt.Errorf("%w: it is for %.100q, not for %s; choose with --platform", image.ErrNoPlatform, have, want)
	}
	if c.RootFS.Type != "layers" {
		return nil, nil, fmt.Errorf("%w: its root filesystem is of type %.100q, known is \"layers\"", image.ErrBadManifest, c.RootFS.Type)
	}
	if err := checkLayerCount(len(c.RootFS.DiffIDs)); err != nil {
		return nil, nil, err
	}
	run, err := runConfig(c.Config)
	if err != nil {
		return nil, nil, err
	}
	return &manifest{platform: have.String(), arch: c.Architecture, run: run}, c.RootFS.DiffIDs, nil
}

// runConfig converts a configuration, and checks it.
func runConfig(c v1.Config) (image.RunConfig, error) {
	return image.RunConfig{
		Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, User: c.User, Workdir: c.WorkingDir, StopSignal: c.StopSignal, Labels: c.Labels,
		ExposedPorts: slices.Collect(maps.Keys(c.ExposedPorts)),
	}.Checked()
}

// configOf returns the configuration in the form of the OCI image specification.
func configOf(c image.RunConfig) v1.Config {
	out := v1.Config{Entrypoint: c.Entrypoint, Cmd: c.Cmd, Env: c.Env, User: c.User, WorkingDir: c.Workdir, StopSignal: c.StopSignal, Labels: c.Labels}
	if len(c.ExposedPorts) > 0 {
		out.ExposedPorts = map[string]struct{}{}
	}
	for _, p := range c.ExposedPorts {
		out.ExposedPorts[p] = struct{}{}
	}
	return out
}
