package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
)

// volumeDoc is a volume as JSON, and volumeInfo one with what uses it.
type volumeDoc struct {
	Version    int                 `json:"version"`
	ID         string              `json:"id"`
	Name       string              `json:"name"`
	Size       int64               `json:"size"`
	Created    time.Time           `json:"created"`
	Generation uint64              `json:"generation"`
	Settled    *wire.VolumeSettled `json:"settled,omitempty"`
}

type volumeInfo struct {
	volumeDoc
	Allocated int64             `json:"allocated_bytes"`
	UsedBy    []wire.VolumeUser `json:"used_by"`
}

const defaultVolumeMiB = 1024

func (a *app) volumeCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "volume", Short: "Manage volumes: disks that outlive the VMs that use them",
		Long: `Manage volumes: disks that outlive the VMs that use them. "drowse run --volume NAME:/PATH" mounts
a volume in a VM. One VM may write to it, or any number may read it (NAME:/PATH:ro). A sleeping
VM keeps its volumes.

No snapshot has the content of a volume. A woken VM finds its volumes as it left them. A snapshot
of a VM that could write to a volume cannot be cloned.`,
	}, a.volumeCreateCommand(), a.volumeListCommand(),
		a.volumeInspectCommand(),
		a.volumeResizeCommand(), a.volumeRemoveCommand())
}

func (a *app) volumeCreateCommand() *cobra.Command {
	size := mebibytes(defaultVolumeMiB)
	cmd := &cobra.Command{
		Use: "create NAME", Annotations: makesState, Short: "Make a volume with an empty ext4 file system", Args: cobra.ExactArgs(1),
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			v, err := p.createVolume(cmd.Context(), args[0], int64(size))
			return a.answerVolume(v, err)
		}),
	}
	cmd.Flags().Var(&size, "size", "size, such as 4g; a number alone is MiB; occupies what is written to it")
	return cmd
}

// answerVolume prints a new or changed volume.
func (a *app) answerVolume(v volumeDoc, err error) error {
	return a.answer(v, err, func(w io.Writer) { fmt.Fprintln(w, v.Name) })
}

func (a *app) volumeInspectCommand() *cobra.Command {
	cmd := showCommand(a, "inspect NAME", "Show a volume, as JSON", func(ctx context.Context, p place, name string) (any, error) { return p.volume(ctx, name) })
	cmd.ValidArgsFunction = a.completeVolume
	return cmd
}

func (a *app) volumeListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List volumes", Args: cobra.NoArgs,
		RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
			list, err := p.volumes(cmd.Context())
			return errors.Join(err, answerList(a, list, nil, "NAME\tSIZE\tSTORED\tCREATED\tVMS", func(i volumeInfo) []any {
				return []any{i.Name, bytesText(i.Size), bytesText(i.Allocated), i.Created.Local().Format(dayMinute), volumeUsers(i)}
			}))
		}),
	}
}

func volumeUsers(i volumeInfo) string {
	var users []string
	for _, u := range i.UsedBy {
		users = append(users, fmt.Sprintf("%s (%s)", u.VM, u.Phase))
	}
	return strings.Join(users, ", ")
}

func (a *app) volumeResizeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "resize NAME SIZE", Short: "Enlarge a volume that no running or sleeping VM uses", Args: cobra.ExactArgs(2), ValidArgsFunction: a.firstArg(a.completeVolume),
		Long: `Enlarge a volume and its file system to SIZE, such as 8g; a number alone is MiB. Volumes do not
shrink. No running or sleeping VM may use the volume. drowse works on a copy, so there must be room
for the volume's data once more. If drowse is killed meanwhile, the volume has its old or new size.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			var size mebibytes
			if err := size.Set(args[1]); err != nil {
				return usageError{err}
			}
			v, err := p.resizeVolume(cmd.Context(), args[0], int64(size))
			return a.answerVolume(v, err)
		}),
	}
}

func (a *app) volumeRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Delete volumes that no VM uses", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVolume,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			return each(a, args, "volumes", func(name string) (map[string]string, error) {
				return map[string]string{"removed": name}, p.RemoveVolume(cmd.Context(), name)
			}, func(w io.Writer, v map[string]string) { fmt.Fprintln(w, v["removed"]) })
		}),
	}
}
