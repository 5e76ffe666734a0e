package builder

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/erofs"
	"github.com/drowse-vm/drowse/rootfs/image/layers"
	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

// AssemblyOptions are the options of an Assembly. Store is required, the rest may be zero.
type AssemblyOptions struct {
	Store *image.Store
	// Base is the image below the steps; nil means an empty root filesystem.
	Base *image.Image
	// MaxBytes and MaxFiles bound what all steps together add, as in Options.
	MaxBytes int64
	MaxFiles int
	// Progress is as in Options.
	Progress image.Progress
}

// Assembly is an image that is made of steps: a base, and layers over it. The store keeps each step's result under
// a key, for reuse while everything below the step is the same. Not safe for concurrent use. Close it.
type Assembly struct {
	b      *buildOptions
	base   *image.Image
	file   *os.File // of the base; nil if there is none
	lock   *os.File // keeps steps from being pruned
	tmp    *image.Temp
	layers []image.Layer
	keys   []string // of the steps so far
	spools []*os.File
	fresh  string // digest of a layer that is read for the first time
	nonce  string
	made   []*image.Image // images to boot from, removed by Close
}

// stepsDir holds the results of steps: a record for each step under its key, and layers under their digests.
const stepsDir = "steps"

// stepRecipe is raised when the same step gives a different result than before.
const stepRecipe = 1

// maxStepRecord bounds the record of a step, in bytes. Its layers are no more than those of an image.
const maxStepRecord = 256 << 10

// stepRecord is the result of a step: all layers over the base.
type stepRecord struct {
	Version int           `json:"version"`
	Step    string        `json:"step"` // for display
	Layers  []image.Layer `json:"layers"`
}

// NewAssembly starts an image of steps.
func NewAssembly(ctx context.Context, o AssemblyOptions) (_ *Assembly, err error) {
	if o.Store == nil {
		return nil, fmt.Errorf("make an image of steps: %w: no store is given", image.ErrInvalidOption)
	}
	b, err := checkOptions(Options{Store: o.Store, From: "tar:-", Tag: "steps", MaxBytes: o.MaxBytes, MaxFiles: o.MaxFiles, Progress: o.Progress})
	if err != nil {
		return nil, err
	}
	a := &Assembly{b: b, base: o.Base}
	defer func() {
		if err != nil {
			err = errors.Join(err, a.Close())
		}
	}()
	if err := os.MkdirAll(filepath.Join(o.Store.Dir(), stepsDir), 0o755); err != nil {
		return nil, fmt.Errorf("open the image store: %w", err)
	}
	if a.lock, err = o.Store.Lock(ctx, stepsDir, osfile.Shared); err != nil {
		return nil, err
	}
	if _, err := o.Store.Prune(ctx); err != nil {
		return nil, err
	}
	if a.tmp, err = b.Store.NewTemp(ctx, "build-"); err != nil {
		return nil, err
	}
	a.nonce = filepath.Base(a.tmp.Dir) + time.Now().UTC().Format(time.RFC3339Nano)
	if o.Base != nil {
		if err := o.Store.Check(o.Base); err != nil {
			return nil, err
		}
		if a.file, err = os.Open(o.Base.Path()); err != nil {
			return nil, fmt.Errorf("open the base image: %w", err)
		}
	}
	return a, nil
}

// Close removes temporary files, and the images that Boot has made.
func (a *Assembly) Close() error {
	var errs []error
	a.dropSpools()
	if a.file != nil {
		errs = append(errs, a.file.Close())
	}
	for _, img := range a.made {
		_, err := a.b.Store.Remove(context.Background(), img.ID, nil)
		errs = append(errs, err)
	}
	a.made = nil
	if a.tmp != nil {
		errs = append(errs, a.tmp.Remove())
	}
	if a.lock != nil {
		errs = append(errs, a.lock.Close())
	}
	a.file, a.tmp, a.lock = nil, nil, nil
	return errors.Join(errs...)
}

func (a *Assembly) dropSpools() {
	for _, f := range a.spools {
		_ = f.Close() // the spool is discarded
	}
	a.spools = nil
}

func (a *Assembly) baseID() string {
	if a.base == nil {
		return ""
	}
	return a.base.ID
}

// Key returns a key for a step from everything that decides its result: what is below it, and what it does. Equal
// values of what must give equal JSON.
func (a *Assembly) Key(what any) (string, error) {
	diffs := make([]string, 0, len(a.layers))
	for _, l := range a.layers {
		diffs = append(diffs, l.DiffID)
	}
	j, err := json.Marshal(struct {
		Recipe int
		Base   string
		Layers []string
		What   any
	}{stepRecipe, a.baseID(), diffs, what})
	if err != nil {
		return "", fmt.Errorf("name a step: %w", err)
	}
	sum := sha256.Sum256(j)
	return hex.EncodeToString(sum[:]), nil
}

// Layers returns how many layers lie over the base.
func (a *Assembly) Layers() int { return len(a.layers) }

func stepPath(s *image.Store, key string) string {
	return filepath.Join(s.Dir(), stepsDir, key+".json")
}

func layerPath(s *image.Store, diff string) string {
	return filepath.Join(s.Dir(), stepsDir, layerFile(diff))
}

// layerFile returns the file name of a layer, by the digest of its tar stream.
func layerFile(diff string) string { return strings.ReplaceAll(diff, ":", "-") + ".tar.zst" }

// Use takes the result of a step from the store. It returns false if the result is not there whole.
func (a *Assembly) Use(key string) bool {
	r, err := readStep(a.b.Store, key)
	if err != nil {
		return false
	}
	for _, l := range r.Layers {
		st, err := os.Lstat(layerPath(a.b.Store, l.DiffID))
		if err != nil || !st.Mode().IsRegular() || st.Size() != l.Size {
			return false
		}
	}
	a.layers, a.keys = r.Layers, append(a.keys, key)
	return true
}

func readStep(s *image.Store, key string) (*stepRecord, error) {
	text, err := artifact.ReadFile(stepPath(s, key), maxStepRecord)
	if err != nil {
		return nil, err
	}
	var r stepRecord
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, err
	}
	if r.Version != stepRecipe || len(r.Layers) > layers.MaxLayers {
		return nil, fmt.Errorf("%w: record of a step", image.ErrCorrupt)
	}
	for _, l := range r.Layers {
		if !layers.IsDigest(l.DiffID) {
			return nil, fmt.Errorf("%w: record of a step", image.ErrCorrupt)
		}
	}
	return &r, nil
}

// Put keeps the result of a step: the first below layers, and over them the content of the tar stream, with
// whiteouts as in the OCI image specification. The stream is not trusted: Put bounds it, and writes it anew from
// the parsed entries. text is the step for display. Put omits names in drop: guests have files of their own there.
func (a *Assembly) Put(ctx context.Context, key, text string, below int, stream io.Reader, drop ...string) error {
	if below < 0 || below > len(a.layers) {
		return fmt.Errorf("%w: %d layers below a step, there are %d", image.ErrInvalidOption, below, len(a.layers))
	}
	lim := a.b.newBudget()
	return a.commit(ctx, key, text, below, func(tw *tar.Writer) error { return layers.Copy(ctx, tw, stream, lim, drop) })
}

// Keep records that a step changes nothing.
func (a *Assembly) Keep(key, text string) error {
	if err := writeStep(a.b.Store, key, &stepRecord{Version: stepRecipe, Step: text, Layers: a.layers}); err != nil {
		return err
	}
	a.keys = append(a.keys, key)
	return nil
}

// commit writes a layer, checks that it can be applied to the layers below, and keeps it.
func (a *Assembly) commit(ctx context.Context, key, text string, below int, write func(*tar.Writer) error) error {
	if below+1 > layers.MaxLayers {
		return fmt.Errorf("%w: the steps make more than %d layers", image.ErrTooLarge, layers.MaxLayers)
	}
	f, err := os.CreateTemp(a.tmp.Dir, "layer-")
	if err != nil {
		return fmt.Errorf("%w: %w", layers.ErrSpool, err)
	}
	l, err := layers.Write(f, write)
	if err = errors.Join(err, f.Close()); err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	stack := append(slices.Clone(a.layers[:below]), l)
	if err := os.Rename(f.Name(), layerPath(a.b.Store, l.DiffID)); err != nil {
		return fmt.Errorf("keep a layer in the image store: %w", err)
	}
	if err := osfile.SyncDir(filepath.Join(a.b.Store.Dir(), stepsDir)); err != nil {
		return err
	}
	old := a.layers
	a.layers, a.fresh = stack, l.DiffID
	_, err = a.tree(ctx)
	if a.fresh = ""; err != nil {
		a.layers = old
		return err
	}
	return a.Keep(key, text)
}

// writeStep writes the record of a step. Its layers must be there already.
func writeStep(s *image.Store, key string, r *stepRecord) error {
	if !layers.IsDigest("sha256:" + key) {
		return fmt.Errorf("%w: %.80q is no key of a step", image.ErrInvalidOption, key)
	}
	j, err := json.Marshal(r)
	if err == nil && len(j) > maxStepRecord {
		err = fmt.Errorf("%w: its record has %d bytes", image.ErrTooLarge, len(j))
	}
	if err != nil {
		return fmt.Errorf("keep the result of a step: %w", err)
	}
	// PruneSteps removes temporary files that a crash leaves.
	if err := osfile.WriteFile(stepPath(s, key), j, 0o644); err != nil {
		return fmt.Errorf("keep the result of a step: %w", err)
	}
	return nil
}

// tree applies the layers to the base. Each call invalidates the previous tree.
func (a *Assembly) tree(ctx context.Context) (*layers.Merger, error) {
	a.dropSpools()
	m := layers.NewMerger(a.b.MaxFiles)
	if a.file != nil {
		t, err := erofs.Read(ctx, a.file)
		if err != nil {
			return nil, fmt.Errorf("read the base image %s: %w", a.base.Name(), err)
		}
		m.Tree = t
	}
	for i, l := range a.layers {
		// Cumulative layers repeat files of others, so each has its own budget.
		lim := a.b.newBudget()
		spool, err := layers.NewSpool(a.tmp.Dir)
		if err != nil {
			return nil, err
		}
		a.spools = append(a.spools, spool)
		src := layers.Source{Layer: image.Layer{DiffID: l.DiffID, Size: l.Size}, Open: func(context.Context) (io.ReadCloser, error) {
			return layers.OpenRegular(layerPath(a.b.Store, l.DiffID))
		}}
		read, err := src.Read(ctx, spool, lim)
		if err == nil {
			err = m.Apply(ctx, read)
		}
		if cause := context.Cause(ctx); cause != nil && err != nil {
			return nil, cause
		}
		if errors.Is(err, image.ErrDigest) || errors.Is(err, image.ErrBadArchive) {
			err = errors.Join(err, os.Remove(layerPath(a.b.Store, l.DiffID)))
			if l.DiffID != a.fresh { // it was readable when it was kept
				err = fmt.Errorf("%w: %w; it was damaged in the image store: build again, which makes it anew", image.ErrDigest, err)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("layer %d of %d of the steps: %w", i+1, len(a.layers), err)
		}
	}
	return m, nil
}

// Boot returns an image of the current state for a VM: the base itself, or an image that Close removes.
func (a *Assembly) Boot(ctx context.Context) (*image.Image, error) {
	if a.base != nil && len(a.layers) == 0 {
		return a.base, nil
	}
	// A configuration of its own gives the image an id that no other image has.
	img, err := a.write(ctx, &image.Image{Passing: true}, []byte(a.nonce+fmt.Sprint(len(a.made))))
	if err != nil {
		return nil, err
	}
	if err := a.b.Store.Publish(ctx, img, ""); err != nil {
		return nil, err
	}
	a.made = append(a.made, img)
	return img, nil
}

// Finish makes the image and gives it the tag. It reuses an image of the same base, layers and configuration.
func (a *Assembly) Finish(ctx context.Context, run image.RunConfig, tag string) (*image.Image, error) {
	tag, err := image.NormalizeTag(tag)
	if err != nil {
		return nil, err
	}
	// The limits are those of a configuration from outside.
	if run, err = run.Checked(); err != nil {
		return nil, err
	}
	config, err := run.Canonical()
	if err != nil {
		return nil, err
	}
	spec, err := a.Key(struct{ Image json.RawMessage }{config})
	if err != nil {
		return nil, err
	}
	if img, err := a.b.Store.Reuse(ctx, spec, 0, tag); err != nil || img != nil {
		return img, err
	}
	img, err := a.write(ctx, &image.Image{RunConfig: run, Spec: spec, Base: a.baseID(), Steps: a.keys, Layers: a.layers}, config)
	if err != nil {
		return nil, err
	}
	if img.ID == a.baseID() {
		// Nothing has changed: the base keeps its record, and gets the tag.
		if err := a.b.Store.Tag(ctx, img.ID, tag); err != nil {
			return nil, err
		}
		return a.b.Store.ByID(img.ID)
	}
	return img, a.b.Store.Publish(ctx, img, tag)
}

// write makes the file of an image.
func (a *Assembly) write(ctx context.Context, img *image.Image, config []byte) (*image.Image, error) {
	m, err := a.tree(ctx)
	if err != nil {
		return nil, err
	}
	t := m.Tree
	if err := addVMFiles(t, false); err != nil {
		return nil, fmt.Errorf("make an image of steps: %w", err)
	}
	t.Config = config
	img.Source, img.Architecture = "steps:scratch", runtime.GOARCH
	if a.base != nil {
		img.Source, img.Architecture, img.Platform = "steps:"+a.base.ShortID(), a.base.Architecture, a.base.Platform
	}
	dir, err := os.MkdirTemp(a.tmp.Dir, "image-")
	if err != nil {
		return nil, fmt.Errorf("make an image of steps: %w", err)
	}
	if err := describePackages(t, img); err != nil {
		return nil, fmt.Errorf("make an image of steps: %w", err)
	}
	if err := a.b.Store.Write(ctx, t, img, filepath.Join(dir, "image"), a.b.progress); err != nil {
		return nil, fmt.Errorf("make an image of steps: %w", err)
	}
	a.b.progress(image.StagePublish, 0, 0)
	return img, nil
}

// PruneSteps removes results of steps that belong to no image, and images to boot from that dead builds left. It
// removes nothing while a build of steps is under way, or when the record of an image cannot be read (ErrCorrupt).
func PruneSteps(ctx context.Context, s *image.Store, inUse func(id string) bool) (image.Freed, error) {
	out, err := s.PruneFolder(stepsDir, func(images []*image.Image) (func(string) bool, error) {
		var errs []error
		needed := map[string]bool{}
		for _, img := range images {
			for _, key := range img.Steps {
				if r, err := readStep(s, key); err == nil {
					needed[key+".json"] = true
					for _, l := range r.Layers {
						needed[layerFile(l.DiffID)] = true
					}
				}
			}
			if img.Passing && len(img.Tags) == 0 {
				if _, err := s.Remove(ctx, img.ID, inUse); err != nil && !errors.Is(err, image.ErrInUse) {
					errs = append(errs, err)
				}
			}
		}
		return func(name string) bool { return needed[name] }, errors.Join(errs...)
	})
	// Do not report layers of steps: they are parts of results.
	out.Names = slices.DeleteFunc(out.Names, func(name string) bool { return !strings.HasSuffix(name, ".json") })
	return out, err
}
