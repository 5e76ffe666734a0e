package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

func (a *app) imageCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "image", Short: "Build, list, inspect, export and remove root file systems",
	}, append(a.imageVerbs(), a.imageListCommand(), a.pullCommand(), a.imageRemoveCommand())...)
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
func (i imageRow) shortID() string { return i.ID[:min(len(i.ID), 12)] }

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
