package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
	"github.com/drowse-vm/drowse/sandbox"
)

// Values of --pull.
const (
	pullMissing = "missing"
	pullAlways  = "always"
	pullNever   = "never"
)

// pullFlags say how to take an image from a registry.
type pullFlags struct {
	when      string
	plainHTTP bool
	// tell, if not nil, is also called with the progress.
	tell func(stage string, done, total int64)
}

func (p *pullFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.when, "pull", pullMissing, "take the image from its registry: always, missing or never")
	p.addPlain(cmd)
}

func (p *pullFlags) addPlain(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&p.plainHTTP, "plain-http", false, "talk to the registry without TLS")
}

func (p *pullFlags) check() error {
	switch p.when {
	case pullMissing, pullAlways, pullNever:
		return nil
	}
	return usageError{fmt.Errorf("--pull %q: use %s, %s or %s", p.when, pullAlways, pullMissing, pullNever)}
}

// find returns an image of the store by tag or id, also by the long form of a name: docker.io/library/python.
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

func (a *app) pullCommand() *cobra.Command {
	var (
		p     pullFlags
		quiet bool
	)
	cmd := &cobra.Command{
		Use: "pull IMAGE...", Annotations: makesState, Short: "Take images from a registry",
		Long: `Take images from a registry and make file systems for VMs of them. IMAGE is a name as docker knows
it: python:3.12 is docker.io/library/python:3.12. Credentials and mirrors are docker's:
$DOCKER_CONFIG or ~/.docker/config.json and its helpers, and the "registry-mirrors" of
/etc/docker/daemon.json. "drowse run" pulls what is missing.`,
		Args: cobra.MinimumNArgs(1),
		RunE: a.onImages(func(cmd *cobra.Command, args []string, s *image.Store) error {
			return each(a, args, "pulled", func(ref string) (imageInfo, error) {
				img, err := a.pull(cmd.Context(), s, ref, p)
				if err != nil {
					return imageInfo{}, err
				}
				return infoOf(img), nil
			}, func(w io.Writer, i imageInfo) { fmt.Fprintln(w, i.Name()) })
		}),
	}
	p.addPlain(cmd)
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "")
	_ = cmd.Flags().MarkHidden("quiet") // docker's: only the name goes to stdout anyway
	return cmd
}

// imagesCommand and rmiCommand are docker's short forms.
func (a *app) imagesCommand() *cobra.Command {
	cmd := a.imageListCommand()
	cmd.Use, cmd.Short = "images", `List images, as "drowse image ls"`
	return cmd
}

func (a *app) rmiCommand() *cobra.Command {
	cmd := a.imageRemoveCommand()
	cmd.Use, cmd.Short = "rmi REF...", `Remove images, as "drowse image rm"`
	return cmd
}

// each does something to all that words name, and prints the results: several as one JSON document with the name done.
// It goes on after an error.
func each[T any](a *app, words []string, done string, do func(word string) (T, error), text func(io.Writer, T)) error {
	results, errs := []T{}, []error{}
	for _, w := range words {
		v, err := do(w)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if results = append(results, v); !a.json() {
			text(a.stdout, v)
		}
	}
	switch {
	case !a.json():
	case len(words) > 1:
		errs = append(errs, printJSON(a.stdout, map[string]any{done: results}))
	case len(results) > 0:
		errs = append(errs, printJSON(a.stdout, results[0]))
	}
	return errors.Join(errs...)
}
