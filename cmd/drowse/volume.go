//go:build linux

package main

import (
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/volume"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/state"
)

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
		a.showCommand("inspect NAME", "Show a volume, as JSON", func(s *sandbox.Host, name string) (any, error) { return s.State.InspectVolume(name) }),
		a.volumeResizeCommand(), a.volumeRemoveCommand())
}

func (a *app) volumeCreateCommand() *cobra.Command {
	size := int64(defaultVolumeMiB)
	cmd := &cobra.Command{
		Use: "create NAME", Annotations: makesState, Short: "Make a volume with an empty ext4 file system", Args: cobra.ExactArgs(1),
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			r, err := s.State.Volumes().Create(cmd.Context(), args[0], volumeBytes(size))
			return a.answerVolume(r, err)
		}),
	}
	cmd.Flags().Int64Var(&size, "size", size, "size in MiB; it occupies what is written to it")
	return cmd
}

// volumeBytes returns a size in bytes, or 0 for an impossible one, which is refused later.
func volumeBytes(mib int64) int64 {
	if mib < 0 || mib > volume.MaxSize>>20 {
		return 0
	}
	return mib << 20
}

// answerVolume prints a new or changed volume.
func (a *app) answerVolume(r *volume.Record, err error) error {
	if errors.Is(err, volume.ErrName) || errors.Is(err, volume.ErrSize) {
		err = usageError{err}
	}
	return a.answer(r, err, func(w io.Writer) { fmt.Fprintln(w, r.Name) })
}

func (a *app) volumeListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List volumes", Args: cobra.NoArgs,
		RunE: a.onHost(func(_ *cobra.Command, _ []string, s *sandbox.Host) error {
			records, listErr := s.State.Volumes().List()
			var list []*state.VolumeInfo
			for _, r := range records {
				i, err := s.State.InspectVolume(r.Name)
				if err != nil {
					listErr = errors.Join(listErr, err)
					continue
				}
				list = append(list, i)
			}
			return errors.Join(listErr, answerList(a, list, nil, "NAME\tSIZE\tSTORED\tCREATED\tVMS", func(i *state.VolumeInfo) []any {
				return []any{i.Name, bytesText(i.Size), bytesText(i.Allocated), i.Created.Local().Format(dayMinute), volumeUsers(i)}
			}))
		}),
	}
}

func volumeUsers(i *state.VolumeInfo) string {
	var users []string
	for _, u := range i.UsedBy {
		users = append(users, fmt.Sprintf("%s (%s)", u.VM, u.Phase))
	}
	return strings.Join(users, ", ")
}

func (a *app) volumeResizeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "resize NAME SIZE", Short: "Enlarge a volume that no running or sleeping VM uses", Args: cobra.ExactArgs(2),
		Long: `Enlarge a volume and its file system to SIZE, in MiB. Volumes do not shrink. No running or sleeping
VM may use the volume. drowse works on a copy, so there must be room for the volume's data once
more. If anything is killed meanwhile, the volume has its old or its new size.`,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			mib, err := strconv.ParseInt(args[1], 10, 64)
			if err != nil {
				return usageError{fmt.Errorf("size %q: use a number of MiB", args[1])}
			}
			r, err := s.State.ResizeVolume(cmd.Context(), args[0], volumeBytes(mib))
			return a.answerVolume(r, err)
		}),
	}
}

func (a *app) volumeRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME...", Short: "Delete volumes that no VM uses", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVolume,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			return each(a, args, "volumes", func(name string) (map[string]string, error) {
				return map[string]string{"removed": name}, s.State.RemoveVolume(cmd.Context(), name)
			}, func(w io.Writer, v map[string]string) { fmt.Fprintln(w, v["removed"]) })
		}),
	}
}
