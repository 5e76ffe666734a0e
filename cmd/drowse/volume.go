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
		Use: "volume", Short: "Disks that live beyond the VMs that use them",
		Long: `Disks that live beyond the VMs that use them. "drowse run --volume NAME:/PATH" mounts
one in a VM. One VM may write to a volume, or any number read it (NAME:/PATH:ro); a VM
that sleeps keeps its volumes.

The content of a volume is not part of any snapshot. A VM that has slept goes on with
a volume as it left it; a snapshot whose guest had it for writing cannot be cloned.`,
	}, a.volumeCreateCommand(), a.volumeListCommand(), a.volumeInspectCommand(), a.volumeResizeCommand(), a.volumeRemoveCommand())
}

func (a *app) volumeCreateCommand() *cobra.Command {
	size := int64(defaultVolumeMiB)
	cmd := &cobra.Command{
		Use: "create NAME", Annotations: makesState, Short: "Make a volume with an empty ext4", Args: cobra.ExactArgs(1),
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			r, err := s.State.Volumes().Create(cmd.Context(), args[0], volumeBytes(size))
			return a.answerVolume(r, err)
		}),
	}
	cmd.Flags().Int64Var(&size, "size", size, "size in MiB; it takes what is written to it")
	return cmd
}

// volumeBytes is a size in bytes; one that cannot be is 0, which is refused.
func volumeBytes(mib int64) int64 {
	if mib < 0 || mib > volume.MaxSize>>20 {
		return 0
	}
	return mib << 20
}

// answerVolume prints a volume that was made or changed.
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

func (a *app) volumeInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME", Short: "Print all that is known of a volume, as JSON", Args: cobra.ExactArgs(1),
		RunE: a.onHost(func(_ *cobra.Command, args []string, s *sandbox.Host) error {
			i, err := s.State.InspectVolume(args[0])
			return a.answer(i, err, func(w io.Writer) { _ = printJSON(w, i) })
		}),
	}
}

func (a *app) volumeResizeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "resize NAME SIZE", Short: "Make a volume that no VM runs or sleeps with larger", Args: cobra.ExactArgs(2),
		Long: `Make a volume and its file system larger: SIZE in MiB. A volume of that size stays as it is,
and none gets smaller. No VM may run or sleep with it. It is done in a copy, so there must be
room for what the volume takes once more; whatever is killed meanwhile, the volume is as it
was or has the new size.`,
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
		Use: "rm NAME", Short: "Delete a volume that no VM names", Args: cobra.ExactArgs(1),
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			err := s.State.RemoveVolume(cmd.Context(), args[0])
			return a.answer(map[string]string{"removed": args[0]}, err, func(w io.Writer) { fmt.Fprintln(w, args[0]) })
		}),
	}
}
