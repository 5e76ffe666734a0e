package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
)

func (a *app) imageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "image", Short: "Build, list and remove root file systems", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.imageBuildCommand(), a.imageListCommand(), a.imageRemoveCommand())
	return cmd
}

// imageInfo is an image in JSON: its record, and what only the moment knows.
type imageInfo struct {
	*image.Image
	Path   string `json:"path"`
	Cached bool   `json:"cached"` // build: it was there already
}

func infoOf(i *image.Image) imageInfo { return imageInfo{i, i.Path(), i.Cached} }

// countsBytes says of a stage of an image's build that its progress is in bytes.
func countsBytes(stage string) bool {
	switch stage {
	case image.StageDownload, image.StageRead, image.StageWrite, image.StageHash:
		return true
	}
	return false
}

func (a *app) imageBuildCommand() *cobra.Command {
	var o image.Options
	cmd := &cobra.Command{
		Use:   "build --from SOURCE",
		Short: "Make an image from Debian packages or a directory",
		Long: `Make an image from Debian packages or a directory. SOURCE is one of

  debian:SUITE   a minimal Debian, such as debian:bookworm, with the packages of --include
  dir:PATH       a directory tree of this host

An image of the same Debian source that is younger than --max-age is used instead of
building a new one.`,
		Example: "  drowse image build --from debian:bookworm --include python3,git --tag dev",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.From == "" {
				return usageError{errors.New("no source given: use --from debian:SUITE or --from dir:PATH")}
			}
			s, err := a.images()
			if err != nil {
				return err
			}
			p := a.newProgress("image build", countsBytes)
			o.Store, o.Progress, o.Log = s, p.report, p.toolLog(a)
			img, err := image.Build(cmd.Context(), o)
			p.finish(err)
			if errors.Is(err, image.ErrInvalidOption) || errors.Is(err, image.ErrUnsupportedSource) {
				return usageError{err}
			}
			if err != nil {
				return err
			}
			return a.print(infoOf(img), func(w io.Writer) { fmt.Fprintln(w, strings.Join(img.Tags, " "), img.ShortID()) })
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.From, "from", "", "what to make it from: debian:SUITE or dir:PATH")
	f.StringSliceVar(&o.Include, "include", nil, "Debian packages to put in, separated by commas; repeatable")
	f.StringVarP(&o.Tag, "tag", "t", "", "NAME or NAME:VERSION (default: made from the source, such as debian-python:latest)")
	f.BoolVar(&o.NoCache, "no-cache", false, "build anew in any case")
	f.DurationVar(&o.MaxAge, "max-age", image.DefaultMaxAge, "use an image of the same source up to this age")
	f.BoolVar(&o.NoDocs, "no-docs", false, "leave out documentation, manual and info pages")
	f.StringArrayVar(&o.Mirrors, "mirror", nil, "Debian archive, or line as in sources.list, to use instead of the host's; repeatable")
	f.BoolVar(&o.InstallDeps, "install-deps", false, "install missing build tools with apt-get")
	return cmd
}

// images opens the image store of the state directory.
func (a *app) images() (*image.Store, error) {
	s, err := a.store()
	if err != nil {
		return nil, err
	}
	return image.OpenStore(s.ImageDir())
}

func (a *app) imageListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List images", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			s, err := a.images()
			if err != nil {
				return err
			}
			list, listErr := s.List()
			infos := []imageInfo{}
			for _, i := range list {
				infos = append(infos, infoOf(i))
			}
			err = a.print(infos, func(w io.Writer) {
				t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
				fmt.Fprintln(t, "TAGS\tID\tSOURCE\tPACKAGES\tSIZE\tCREATED")
				for _, i := range list {
					tags := strings.Join(i.Tags, ",")
					if tags == "" {
						tags = "-"
					}
					fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\n", tags, i.ShortID(), i.Source, len(i.Packages), bytesText(i.Size), i.Created.Local().Format("2006-01-02 15:04"))
				}
				t.Flush()
			})
			return errors.Join(listErr, err)
		},
	}
}

func (a *app) imageRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rm REF...",
		Short: "Remove images that no VM and no snapshot needs",
		Long: `Remove images that no VM and no snapshot needs. REF is a tag, an id, or the beginning
of an id. A tag of an image that has others is only taken away.`,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeImage,
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			images, err := image.OpenStore(s.ImageDir())
			if err != nil {
				return err
			}
			type row struct {
				Ref      string   `json:"ref"`
				ID       string   `json:"id"`
				Untagged []string `json:"untagged"`
				Deleted  bool     `json:"deleted"`
			}
			rows := []row{}
			var errs []error
			for _, ref := range args {
				r, err := removeImage(cmd.Context(), s, images, ref)
				if err != nil {
					errs = append(errs, err)
					continue
				}
				if r.Untagged == nil {
					r.Untagged = []string{}
				}
				rows = append(rows, row{ref, r.ID, r.Untagged, r.Deleted})
			}
			perr := a.print(map[string][]row{"removed": rows}, func(w io.Writer) {
				for _, r := range rows {
					fmt.Fprintln(w, r.Ref)
				}
			})
			return errors.Join(append(errs, perr)...)
		},
	}
}

func removeImage(ctx context.Context, s *sandbox.Store, images *image.Store, ref string) (image.Removal, error) {
	var (
		users []string
		uerr  error
	)
	r, err := images.Remove(ctx, ref, func(id string) bool {
		users, uerr = s.ImageUsers(id)
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

func (a *app) completeImage(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	s, err := a.images()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	list, _ := s.List() // those that can be read
	var names []string
	for _, i := range list {
		names = append(names, i.Tags...)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}
