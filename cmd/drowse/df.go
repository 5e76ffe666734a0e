//go:build linux

package main

import (
	"errors"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// usageRow is what one kind of things takes on disk.
type usageRow struct {
	Kind        string `json:"kind"`
	Bytes       int64  `json:"bytes"`
	Reclaimable int64  `json:"reclaimable_bytes"`
	By          string `json:"reclaimed_by,omitempty"`
}

func (a *app) dfCommand() *cobra.Command {
	return &cobra.Command{
		Use: "df", Short: "Show what uses the disk, by kind, and what can be reclaimed", Args: cobra.NoArgs,
		Long: `Show what uses the disk, by kind. What can be reclaimed are sleeps that no metadata keeps, images
that no VM or snapshot needs, downloads of images, and volumes that no VM uses. A file that two
kinds share counts once.`,
		RunE: a.onHost(func(cmd *cobra.Command, _ []string, s *sandbox.Host) error {
			u, err := s.State.Usage(cmd.Context())
			if err != nil {
				return err
			}
			var errs []error
			plan, err := fleet.New(s, fleet.Options{}).Prune(cmd.Context(), true)
			errs = append(errs, err)
			free, err := unusedImages(s)
			errs = append(errs, err)
			idle, err := unusedVolumes(s)
			errs = append(errs, err)
			blobs, _ := state.DiskUsage(filepath.Join(s.State.Dir(), "blobs"))
			kernels, _ := state.DiskUsage(filepath.Join(s.State.Dir(), "kernels"))
			rows := []usageRow{
				{"images", u.Images, min(free, u.Images), "drowse rmi"},
				{"downloads", blobs, blobs, "drowse image prune"},
				{"kernels", kernels, 0, ""},
				{"disks", u.Layers, 0, ""},
				{"sleeps", u.Snapshots, min(plan.Bytes, u.Snapshots), "drowse prune"},
				{"snapshots", u.Kept, 0, ""},
				{"pages", u.Pages, 0, ""},
				{"volumes", u.Volumes, idle, "drowse volume rm"},
			}
			for i := range rows {
				if rows[i].Reclaimable == 0 {
					rows[i].By = ""
				}
			}
			errs = append(errs, answerList(a, rows, nil, "KIND\tSIZE\tRECLAIMABLE\tBY", func(r usageRow) []any {
				return []any{r.Kind, bytesText(r.Bytes), bytesText(r.Reclaimable), dash(r.By)}
			}))
			return errors.Join(errs...)
		}),
	}
}

// unusedImages returns the bytes on disk of images that no VM and no snapshot needs.
func unusedImages(s *sandbox.Host) (bytes int64, err error) {
	images, err := image.OpenStore(s.State.ImageDir())
	if err != nil {
		return 0, err
	}
	list, err := images.List()
	for _, i := range list {
		users, uerr := s.State.ImageUsers(i.ID)
		if uerr != nil {
			return bytes, errors.Join(err, uerr)
		}
		if len(users) == 0 {
			_, own := state.DiskUsage(filepath.Dir(i.Path()))
			bytes += own
		}
	}
	return bytes, err
}

// unusedVolumes returns the bytes on disk of volumes that no VM uses.
func unusedVolumes(s *sandbox.Host) (bytes int64, err error) {
	list, err := s.State.Volumes().List()
	for _, v := range list {
		i, ierr := s.State.InspectVolume(v.Name)
		if ierr != nil {
			err = errors.Join(err, ierr)
			continue
		}
		if len(i.UsedBy) == 0 {
			bytes += i.Allocated
		}
	}
	return bytes, err
}
