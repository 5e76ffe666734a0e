package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

func (a *app) imageCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "image", Short: "Build, list, inspect, export and remove root file systems",
	}, append(a.imageVerbs(), a.imageListCommand(), a.imageInspectCommand(), a.imageExportCommand(), a.pullCommand(), a.imageRemoveCommand())...)
}

// imageRow is an image in a list.
type imageRow struct {
	ID              string
	Tags            []string
	Source          string
	Packages        int
	Size            int64
	Created         time.Time
	Entrypoint, Cmd []string
	name            string // for people
	doc             any    // for JSON
}

// MarshalJSON returns the whole record.
func (i imageRow) MarshalJSON() ([]byte, error) { return json.Marshal(i.doc) }

// shortID is how much of an image's id lists have.
func (i imageRow) shortID() string { return imageText(i.ID) }

// imageText returns an image's id as lists show it, and tags as they are.
func imageText(ref string) string {
	if len(ref) == 64 && !strings.Contains(ref, ":") {
		return ref[:12]
	}
	return ref
}

func (a *app) imageListCommand() *cobra.Command {
	var quiet bool
	cmd := &cobra.Command{
		Use: "ls", Short: "List images", Args: cobra.NoArgs,
		RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
			list, listErr := p.images(cmd.Context())
			if quiet && !a.json() {
				for _, i := range list {
					fmt.Fprintln(a.stdout, i.shortID())
				}
				return listErr
			}
			return errors.Join(listErr, answerList(a, list, nil, "TAGS\tID\tSOURCE\tPACKAGES\tSIZE\tCREATED", func(i imageRow) []any {
				return []any{dash(strings.Join(i.Tags, ",")), i.shortID(), i.Source, i.Packages, bytesText(i.Size), i.Created.Local().Format(dayMinute)}
			}))
		}),
	}
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "only ids, one a line")
	return cmd
}

func (a *app) imageRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "rm REF...",
		Short: "Remove images that no VM or snapshot needs",
		Long: `Remove images that no VM or snapshot needs. REF is a tag, an id, or the beginning of an id. If
the image has other tags, only the given tag is removed.`,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeImage,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			type row struct {
				Ref string `json:"ref"`
				wire.ImageRemoved
			}
			return removeAll(a, args, func(ref string) (row, error) {
				r, err := p.removeImage(cmd.Context(), ref)
				return row{ref, r}, err
			})
		}),
	}
}

func (a *app) completeImage(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return completions(a.place, func(p place) (names []string) {
		list, _ := p.images(cmd.Context()) // only the readable ones
		for _, i := range list {
			names = append(names, i.Tags...)
		}
		return names
	})
}

// imageDoc is what people see of the record of an image.
type imageDoc struct {
	ID           string            `json:"id"`
	Tags         []string          `json:"tags"`
	Source       string            `json:"source"`
	Packages     []json.RawMessage `json:"packages"`
	Size         int64             `json:"size"`
	Content      int64             `json:"content"`
	Inodes       int               `json:"inodes"`
	Created      time.Time         `json:"created"`
	Architecture string            `json:"architecture"`
	Entrypoint   []string          `json:"entrypoint"`
	Cmd          []string          `json:"cmd"`
	Env          []string          `json:"env"`
	User         string            `json:"user"`
	Workdir      string            `json:"workdir"`
	StopSignal   string            `json:"stop_signal"`
	ExposedPorts []string          `json:"exposed_ports"`
	Labels       map[string]string `json:"labels"`
	Manifest     string            `json:"manifest"`
	Config       string            `json:"config"`
	Base         string            `json:"base"`
	Layers       []struct {
		Digest string `json:"digest"`
		DiffID string `json:"diff_id"`
		Size   int64  `json:"size"`
	} `json:"layers"`
}

func (a *app) imageInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect REF", Short: "Show an image: source, layers, digests, configuration",
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeImage,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			text, err := p.image(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			var img imageDoc
			if err := json.Unmarshal(text, &img); err != nil {
				return fmt.Errorf("reading the record of image %s: %w", args[0], err)
			}
			return a.print(text, func(w io.Writer) { printImage(w, &img) })
		}),
	}
}

// printImage prints an image for people. It quotes text of other authors.
func printImage(w io.Writer, i *imageDoc) {
	t := columns(w)
	row := func(name, format string, args ...any) { fmt.Fprintf(t, name+"\t"+format+"\n", args...) }
	list := func(name string, items []string) {
		for _, s := range items {
			row(name, "%q", s)
			name = ""
		}
	}
	known := func(name, format, value string) {
		if value != "" {
			row(name, format, value)
		}
	}
	row("id", "%s", i.ID)
	row("tags", "%s", strings.Join(i.Tags, " "))
	row("source", "%s", i.Source)
	row("created", "%s", i.Created.Local().Format(dayMinute))
	row("architecture", "%q", i.Architecture)
	row("size", "%s (%s of files)", bytesText(i.Size), bytesText(i.Content))
	row("inodes", "%d", i.Inodes)
	row("packages", "%d", len(i.Packages))
	known("manifest", "%s", i.Manifest)
	known("configuration", "%s", i.Config)
	name := "layers"
	for _, l := range i.Layers {
		digest, size := l.Digest, "size not said"
		if digest == "" {
			digest = l.DiffID
		}
		if l.Size >= 0 {
			size = bytesText(l.Size)
		}
		row(name, "%s (%s)", digest, size)
		name = ""
	}
	list("entrypoint", i.Entrypoint)
	list("cmd", i.Cmd)
	list("env", i.Env)
	known("user", "%q", i.User)
	known("working directory", "%q", i.Workdir)
	known("stop signal", "%q", i.StopSignal)
	if len(i.ExposedPorts) > 0 {
		row("ports", "%q", i.ExposedPorts)
	}
	known("base", "%s", i.Base)
	name = "labels"
	for _, k := range slices.Sorted(maps.Keys(i.Labels)) {
		row(name, "%q = %q", k, i.Labels[k])
		name = ""
	}
	t.Flush()
}

func (a *app) imageExportCommand() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use: "export REF FILE", Short: "Export an image to a file or stdout",
		Long: `Export an image to a file; - is stdout. The formats are

  erofs         the image as it is (the default)
  tar           its files as a tar archive
  oci-archive   an OCI container image of one layer with its configuration, which
                docker load reads as well

The same image gives the same bytes.`,
		Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeImage,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			if args[1] == "-" && a.json() {
				return usageError{errors.New("stdout cannot have both the image and a JSON document: name a file")}
			}
			bar := a.newProgress("image export")
			var id string
			write := func(w io.Writer) (err error) {
				id, err = p.exportImage(cmd.Context(), args[0], format, w, func(done, total int64) { bar.report("write", done, total) })
				return err
			}
			var err error
			if args[1] == "-" {
				err = write(a.stdout)
			} else {
				err = replaceFile(args[1], 0o644, func(f *os.File) error { return write(f) })
			}
			bar.finish(err)
			if err != nil || args[1] == "-" {
				return err
			}
			st, err := os.Stat(args[1])
			if err != nil {
				return err
			}
			out := struct {
				ID     string `json:"id"`
				Format string `json:"format"`
				File   string `json:"file"`
				Size   int64  `json:"size"`
			}{id, format, args[1], st.Size()}
			return a.print(out, func(w io.Writer) { fmt.Fprintf(w, "%s %s\n", args[1], bytesText(st.Size())) })
		}),
	}
	cmd.Flags().StringVar(&format, "format", "erofs", "erofs, tar or oci-archive")
	return cmd
}
