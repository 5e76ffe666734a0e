//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/image/oci"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/build"
)

// imageVerbs are the commands on images that need their files.
func (a *app) imageVerbs() []*cobra.Command {
	return []*cobra.Command{a.imageBuildCommand(), a.imagePruneCommand()}
}

// imageInfo is an image as JSON: its record, its path, and whether a build found it in the cache.
type imageInfo struct {
	*image.Image
	Path   string `json:"path"`
	Cached bool   `json:"cached"` // build: it existed already
}

func infoOf(i *image.Image) imageInfo { return imageInfo{i, i.Path(), i.Cached} }

// maxImageMiB is the most that an EROFS with 32-bit block numbers can hold.
const maxImageMiB = 16 << 20

// patientReader waits for input until the context ends. A read in progress cannot be cancelled.
type patientReader struct {
	ctx context.Context
	f   *os.File
}

func (r *patientReader) Read(p []byte) (int, error) {
	const look = 200 // milliseconds between looks at the context
	for {
		if err := context.Cause(r.ctx); err != nil {
			return 0, err
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(r.f.Fd()), Events: unix.POLLIN}}, look)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, fmt.Errorf("waiting for input: %w", err)
		case n > 0:
			return r.f.Read(p)
		}
	}
}

func (a *app) imageBuildCommand() *cobra.Command {
	var (
		o      builder.Options
		maxMiB int
		steps  stepFlags
		ahead  bool
	)
	cmd := &cobra.Command{
		Use: "build --from SOURCE | --file FILE --tag NAME | --recipe NAME", Annotations: makesState,
		Short: "Make an image from Debian packages, a container image, a tar file, a directory or steps",
		Long: `Make an image from Debian packages, a container image, a tar file, a directory, or the steps of
a build file. SOURCE is one of

  debian:SUITE                 a minimal Debian, such as debian:bookworm, with the packages
                               of --include
  docker://REFERENCE           an image in a registry, with docker's credentials
  docker-archive:FILE[:NAME]   a file of docker save
  oci:PATH[:NAME]              a directory with an OCI image layout
  oci-archive:FILE[:NAME]      a tar archive of such a directory
  tar:FILE                     a tar archive of a whole root file system
  dir:PATH                     a directory tree of this host

FILE may be compressed; - is stdin. :NAME or @DIGEST chooses one of several images.

An image of the same Debian source is reused up to --max-age. A container image is built again
when it has changed.

With --file, FILE has steps in the syntax of a Dockerfile: FROM (an image of
"drowse image ls", a SOURCE, or scratch), RUN, COPY, ADD, ENV, ARG, WORKDIR, USER,
ENTRYPOINT, CMD, LABEL, EXPOSE, STOPSIGNAL. Commands run in a temporary VM, without a network
unless --net and --policy give it one. Their output goes to stderr. Steps are cached, unless
--no-cache is given. docs/guides/images.md has the details.

With --recipe code-interpreter, drowse has the steps: Debian with ipykernel, numpy, pandas,
matplotlib, and a server for E2B's code interpreter (docs/guides/e2b.md). --include adds packages.`,
		Example: `  drowse image build --from debian:bookworm --include python3,git --tag dev
  drowse image build --from docker://ghcr.io/me/app:v1
  docker save app | drowse image build --from docker-archive:- --tag app
  drowse image build --file Drowsefile --tag app
  drowse image build --file Drowsefile --tag app --net tap --policy pypi.yaml
  drowse image build --recipe code-interpreter`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if err := steps.check(cmd); err != nil {
				return err
			}
			done, err := steps.useRecipe(cmd, &o)
			defer func() { err = errors.Join(err, done()) }()
			if err != nil {
				return err
			}
			if o.From == "" && steps.file == "" {
				return usageError{errors.New("no source given: use --from debian:SUITE, docker://REFERENCE or another that `drowse image build --help` lists, or --file")}
			}
			if maxMiB < 1 || maxMiB > maxImageMiB {
				return usageError{fmt.Errorf("--max-size %d: use 1 to %d MiB", maxMiB, maxImageMiB)}
			}
			o.MaxBytes = int64(maxMiB) << 20
			templates := func(*image.Image) error { return nil }
			if ahead {
				templates = func(img *image.Image) error { return a.makeTemplateOf(cmd.Context(), img) }
			}
			if steps.file != "" {
				return a.buildSteps(cmd, &steps, o, templates)
			}
			s, err := a.images()
			if err != nil {
				return err
			}
			p := a.newProgress("image build")
			o.Store, o.Progress, o.Log, o.Stdin = s, p.report, p.toolLog(a), &patientReader{cmd.Context(), os.Stdin}
			img, err := builder.Build(cmd.Context(), o)
			p.finish(err)
			if errors.Is(err, image.ErrInvalidOption) || errors.Is(err, image.ErrUnsupportedSource) {
				return usageError{err}
			}
			if err != nil {
				return err
			}
			if err := templates(img); err != nil {
				return err
			}
			return a.print(infoOf(img), func(w io.Writer) { fmt.Fprintln(w, strings.Join(img.Tags, " "), img.ShortID()) })
		},
	}
	steps.add(cmd)
	f := cmd.Flags()
	f.StringVar(&o.From, "from", "", "source of the image, see above")
	f.StringSliceVar(&o.Include, "include", nil, "additional Debian packages, separated by commas; repeatable")
	f.StringVarP(&o.Tag, "tag", "t", "", "NAME or NAME:VERSION (default: derived from the source, such as debian-python:latest)")
	f.BoolVar(&o.NoCache, "no-cache", false, "build again even if there is an image")
	f.DurationVar(&o.MaxAge, "max-age", builder.DefaultMaxAge, "reuse an image of the same source up to this age")
	f.BoolVar(&o.NoDocs, "no-docs", false, "omit documentation, manual and info pages")
	f.StringArrayVar(&o.Mirrors, "mirror", nil, "Debian archive, or sources.list line, to use instead of the host's; repeatable")
	f.StringVar(&o.Platform, "platform", "", "OS/ARCH of a multi-platform container image (default: linux and this host's architecture)")
	f.BoolVar(&o.PlainHTTP, "plain-http", false, "talk to the registry without TLS")
	f.IntVar(&o.MaxFiles, "max-files", builder.DefaultMaxFiles, "refuse archives with more entries; each takes up to 2 KiB of memory")
	f.IntVar(&maxMiB, "max-size", builder.DefaultMaxBytes>>20, "refuse sources with more MiB of files")
	f.BoolVar(&ahead, "template", false, "make the template for VMs of the default size too (see \"drowse template\")")
	f.BoolVar(&o.InstallDeps, "install-deps", false, "install missing build tools with apt-get")
	return cmd
}

func (a *app) imagePruneCommand() *cobra.Command {
	return &cobra.Command{
		Use: "prune", Short: "Remove downloads and cached build steps that no image needs, and remains of killed builds",
		Args: cobra.NoArgs,
		RunE: a.onHost(func(cmd *cobra.Command, _ []string, vms *sandbox.Host) error {
			if err := build.Sweep(cmd.Context(), vms); err != nil {
				return err
			}
			s, err := a.images()
			if err != nil {
				return err
			}
			n, err := s.Prune(cmd.Context())
			if err != nil {
				return err
			}
			freed, err := oci.PruneBlobs(s)
			if err != nil {
				return err
			}
			steps, err := builder.PruneSteps(cmd.Context(), s, func(id string) bool {
				users, err := vms.State.ImageUsers(id)
				return err != nil || len(users) > 0
			})
			if err != nil {
				return err
			}
			if freed.Busy {
				fmt.Fprintln(a.stderr, "drowse: a build from a registry is under way: no layer was removed")
			}
			if steps.Busy {
				fmt.Fprintln(a.stderr, "drowse: a build of steps is under way: no result of a step was removed")
			}
			out := struct {
				Builds int   `json:"builds"`
				Layers int   `json:"layers"`
				Steps  int   `json:"steps"`
				Bytes  int64 `json:"bytes"`
				Busy   bool  `json:"busy"`
			}{n, len(freed.Names), len(steps.Names), freed.Bytes + steps.Bytes, freed.Busy || steps.Busy}
			return a.print(out, func(w io.Writer) {
				fmt.Fprintf(w, "%d layers, %d results of steps (%s) and %d unfinished builds removed\n", out.Layers, out.Steps, bytesText(out.Bytes), out.Builds)
			})
		}),
	}
}

func removeImage(ctx context.Context, s *sandbox.Host, images *image.Store, ref string) (image.Removal, error) {
	var (
		users []string
		uerr  error
	)
	r, err := images.Remove(ctx, ref, func(id string) bool {
		users, uerr = s.State.ImageUsers(id)
		return uerr != nil || len(users) > 0
	})
	switch {
	case uerr != nil:
		return r, fmt.Errorf("removing image %s: %w", ref, uerr)
	case errors.Is(err, image.ErrInUse):
		return r, fmt.Errorf("%w: %s", err, strings.Join(users, ", "))
	}
	return r, err
}
