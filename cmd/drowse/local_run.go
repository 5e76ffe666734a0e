//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/control"
)

func (l *local) run(ctx context.Context, r *runRequest) error {
	a := l.a
	if err := l.ready(ctx); err != nil {
		return err
	}
	s, full := l.ahead, r.spec
	if err := s.State.FindVolumes(full.Volumes); err != nil {
		return err
	}
	var entrypoint, command []string // a disk's image has its own record
	if r.disk == "" {
		img, err := r.pull.image(ctx, a, s, full.Image)
		if err != nil {
			return err
		}
		full.Image = cmp.Or(firstOf(img.Tags), img.ID)
		entrypoint, command = img.Entrypoint, img.Cmd
	}
	argv, err := r.main.argv(entrypoint, command)
	if err != nil {
		return err
	}
	if full.Name == "" {
		if full.Name, err = newName(ctx, l); err != nil {
			return err
		}
	}
	list, err := readSecrets(r.secrets, os.Stdin)
	if err != nil {
		return err
	}
	defer wipeSecrets(list)
	limited, cancel := context.WithTimeout(ctx, r.limit)
	defer cancel()
	var rep control.Report
	stage := func(error) {}
	if hasWidth(a.stderr) {
		p := a.newProgress("run")
		p.report(stageBoot, 0, 0)
		stage = p.finish
	}
	_, err = s.Create(limited, full, sandbox.CreateOptions{Metadata: r.metadata, Disk: r.disk, Boot: r.boot, Report: &rep})
	stage(err)
	if err != nil {
		return err
	}
	a.makeTemplatesLater(s, rep.Name)
	if r.published && !a.json() {
		fmt.Fprintf(a.stderr, "drowse: published ports are served by `drowse serve`\n")
	}
	if err := handIn(limited, l, list, rep.Name); err != nil || len(argv) == 0 {
		return errors.Join(err, a.printUp(upOf(rep)))
	}
	return a.runMain(ctx, l, upOf(rep), r.main, argv)
}

// findImage returns an image of the store by tag or id, also by the long form of a name: docker.io/library/python.
func findImage(s *image.Store, ref string) (*image.Image, error) {
	img, err := s.Find(ref)
	if errors.Is(err, image.ErrNotFound) {
		if tag, terr := oci.LocalTag(ref); terr == nil && tag != ref {
			if other, oerr := s.Find(tag); oerr == nil {
				return other, nil
			}
		}
	}
	return img, err
}

// image returns the image that a user names. It pulls one that is missing.
func (p *pullFlags) image(ctx context.Context, a *app, s *sandbox.Host, ref string) (*image.Image, error) {
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		return nil, err
	}
	if p.when != pullAlways {
		img, err := findImage(images, ref)
		if err == nil || !errors.Is(err, image.ErrNotFound) || p.when == pullNever {
			return img, err
		}
		if _, terr := oci.LocalTag(ref); terr != nil {
			return nil, err // no registry can have it
		}
		fmt.Fprintf(a.stderr, "drowse: there is no image %s here: pulling it\n", printable(ref))
		img, perr := a.pull(ctx, images, ref, *p)
		if perr != nil {
			return nil, fmt.Errorf("%w; pulling it: %w", err, perr)
		}
		return img, nil
	}
	return a.pull(ctx, images, ref, *p)
}

// pull makes an image of a registry's.
func (a *app) pull(ctx context.Context, s *image.Store, ref string, how pullFlags) (*image.Image, error) {
	tag, err := oci.LocalTag(ref)
	if err != nil {
		return nil, usageError{fmt.Errorf("image %q: %w: name one as python:3.12 or ghcr.io/me/app:v1", ref, err)}
	}
	p := a.newProgress("pull")
	report := func(stage string, done, total int64) {
		p.report(stage, done, total)
		if how.tell != nil {
			how.tell(stage, done, total)
		}
	}
	img, err := builder.Build(ctx, builder.Options{
		From: string(builder.KindRegistry) + "://" + ref, Tag: tag, PlainHTTP: how.plainHTTP, Store: s, Progress: report, Log: p.toolLog(a),
	})
	p.finish(err)
	return img, err
}
