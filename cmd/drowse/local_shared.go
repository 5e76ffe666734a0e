//go:build linux

package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/state"
	"github.com/drowse-vm/drowse/sandbox/template"
)

// volumeBytes returns a size in bytes, or 0 for an impossible one, which is refused later.
func volumeBytes(mib int64) int64 {
	if mib < 0 || mib > volume.MaxSize>>20 {
		return 0
	}
	return mib << 20
}

func volumeOf(r *volume.Record, err error) (volumeDoc, error) {
	if errors.Is(err, volume.ErrName) || errors.Is(err, volume.ErrSize) {
		err = usageError{err}
	}
	if r == nil {
		return volumeDoc{}, err
	}
	v := volumeDoc{Version: r.Version, ID: r.ID, Name: r.Name, Size: r.Size, Created: r.Created, Generation: r.Generation}
	if r.Settled != nil {
		v.Settled = &wire.VolumeSettled{Snapshot: r.Settled.Snapshot, VM: r.Settled.VM}
	}
	return v, err
}

func (l *local) volumes(ctx context.Context) (out []volumeInfo, err error) {
	list, err := l.h.State.Volumes().List()
	for _, r := range list {
		i, ierr := l.volume(ctx, r.Name)
		if ierr != nil {
			err = errors.Join(err, ierr)
			continue
		}
		out = append(out, i)
	}
	return out, err
}

func (l *local) volume(_ context.Context, name string) (volumeInfo, error) {
	i, err := l.h.State.InspectVolume(name)
	if err != nil {
		return volumeInfo{}, err
	}
	out := volumeInfo{Allocated: i.Allocated, UsedBy: []wire.VolumeUser{}}
	out.volumeDoc, err = volumeOf(i.Record, nil)
	for _, u := range i.UsedBy {
		out.UsedBy = append(out.UsedBy, wire.VolumeUser{VM: u.VM, Phase: string(u.Phase), Path: u.Path, ReadOnly: u.ReadOnly})
	}
	return out, err
}

func (l *local) createVolume(ctx context.Context, name string, mib int64) (volumeDoc, error) {
	return volumeOf(l.h.State.Volumes().Create(ctx, name, volumeBytes(mib)))
}

func (l *local) resizeVolume(ctx context.Context, name string, mib int64) (volumeDoc, error) {
	return volumeOf(l.h.State.ResizeVolume(ctx, name, volumeBytes(mib)))
}

func (l *local) RemoveVolume(ctx context.Context, name string) error {
	return l.h.State.RemoveVolume(ctx, name)
}

func templateDocs(list []template.Entry) (out []templateDoc) {
	for _, e := range list {
		out = append(out, templateDoc{Version: e.Version, Key: e.Key, Spec: e.Spec, Snapshot: e.Snapshot, Created: e.Created, Problem: e.Problem, Tried: e.Tried})
	}
	return out
}

func (l *local) templates(context.Context) (out []templateInfo, err error) {
	list, _, err := l.h.State.Templates().List()
	for i, d := range templateDocs(list) {
		t := templateInfo{templateDoc: d, Used: list[i].Used}
		if d.Snapshot != "" {
			t.Stored, _ = state.DiskUsage(l.h.State.SnapshotDir(d.Snapshot)) // 0 if it was removed just now
		}
		out = append(out, t)
	}
	return out, err
}

func (l *local) makeTemplate(ctx context.Context, of *wire.TemplateSpec) ([]templateDoc, error) {
	if err := l.ready(ctx); err != nil {
		return nil, err
	}
	var specs []sandbox.Spec
	if of != nil {
		specs = append(specs, of.VM())
	}
	made, err := l.ahead.MakeTemplates(ctx, specs...)
	return templateDocs(made), err
}

func (l *local) removeTemplate(ctx context.Context, word string) (key string, err error) {
	e, err := l.h.State.Templates().Find(word)
	if err != nil {
		return "", err
	}
	return e.Key, l.h.State.RemoveTemplates(ctx, e)
}

func (l *local) inspectSnapshot(_ context.Context, id string) (any, error) {
	return l.h.State.InspectSnapshot(id)
}

func (l *local) exportSnapshot(ctx context.Context, id string, w io.Writer) error {
	return l.h.State.ExportSnapshot(ctx, id, w)
}

func (l *local) importSnapshot(ctx context.Context, r io.Reader, trust bool) (wire.Imported, error) {
	res, err := l.h.State.ImportSnapshot(ctx, r, state.ImportOptions{Trust: trust})
	return wire.Imported(res), err
}

// findImage returns an image of the state directory, and its store.
func (l *local) findImage(ref string) (*image.Store, *image.Image, error) {
	s, err := image.OpenStore(l.h.State.ImageDir())
	if err != nil {
		return nil, nil, err
	}
	img, err := s.Find(ref)
	return s, img, err
}

func (l *local) image(_ context.Context, ref string) (json.RawMessage, error) {
	_, img, err := l.findImage(ref)
	if err != nil {
		return nil, err
	}
	return json.Marshal(infoOf(img))
}

func (l *local) exportImage(ctx context.Context, ref, format string, w io.Writer, moved func(done, total int64)) (id string, err error) {
	s, img, err := l.findImage(ref)
	if err != nil {
		return "", err
	}
	err = oci.Export(ctx, s, img, oci.Format(format), w, moved)
	if errors.Is(err, image.ErrInvalidOption) {
		err = usageError{err}
	}
	return img.ID, err
}
