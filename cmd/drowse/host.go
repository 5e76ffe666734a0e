package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/fleet"
	"github.com/drowse-vm/drowse/sandbox/state"
)

// versionDoc says what this program was built from.
type versionDoc struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the version of drowse", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			v := versionDoc{version(), runtime.Version(), runtime.GOOS, runtime.GOARCH}
			return a.print(v, func(w io.Writer) { fmt.Fprintf(w, "drowse %s, %s, %s/%s\n", v.Version, v.Go, v.OS, v.Arch) })
		},
	}
}

// infoDoc is `drowse info -o json`.
type infoDoc struct {
	versionDoc
	State     string         `json:"state"`
	Kernel    string         `json:"host_kernel"`
	CPUs      int            `json:"cpus"`
	VMs       map[string]int `json:"vms"` // by phase
	MemoryMiB int            `json:"memory_mib"`
	Images    int            `json:"images"`
	Snapshots int            `json:"snapshots"`
	Volumes   int            `json:"volumes"`
}

func (a *app) infoCommand() *cobra.Command {
	return &cobra.Command{
		Use: "info", Short: "Show the host and what is on it", Args: cobra.NoArgs,
		Long: `Show the host and what is on it. "drowse doctor" checks whether VMs can run, and "drowse df" shows
the use of the disk.`,
		RunE: a.onHost(func(_ *cobra.Command, _ []string, s *sandbox.Host) error {
			i := infoDoc{versionDoc: versionDoc{version(), runtime.Version(), runtime.GOOS, runtime.GOARCH}, State: s.State.Dir(), CPUs: runtime.NumCPU(), VMs: map[string]int{}}
			var u unix.Utsname
			if unix.Uname(&u) == nil {
				i.Kernel = unix.ByteSliceToString(u.Release[:])
			}
			records, err := s.State.List()
			for _, r := range records {
				i.VMs[string(r.Phase)]++
				if r.Phase == state.Running {
					i.MemoryMiB += r.Spec.MemoryMiB
				}
			}
			images, ierr := image.OpenStore(s.State.ImageDir())
			if ierr == nil {
				var list []*image.Image
				list, ierr = images.List()
				i.Images = len(list)
			}
			snapshots, serr := s.State.Snapshots()
			volumes, verr := s.State.Volumes().List()
			i.Snapshots, i.Volumes = len(snapshots), len(volumes)
			return errors.Join(err, ierr, serr, verr, a.print(i, func(w io.Writer) {
				t := columns(w)
				defer t.Flush()
				var phases []string
				for _, p := range slices.Sorted(maps.Keys(i.VMs)) {
					phases = append(phases, fmt.Sprintf("%d %s", i.VMs[p], p))
				}
				fmt.Fprintf(t, "drowse\t%s\nhost\tLinux %s, %s, %d CPUs\nstate\t%s\n", i.Version, i.Kernel, i.Arch, i.CPUs, i.State)
				fmt.Fprintf(t, "VMs\t%s\nmemory of running VMs\t%d MiB\nimages\t%d\nsnapshots\t%d\nvolumes\t%d\n", dash(strings.Join(phases, ", ")), i.MemoryMiB, i.Images, i.Snapshots, i.Volumes)
			}))
		}),
	}
}

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

// portRow is a published port.
type portRow struct {
	Port   string `json:"port"` // of the guest, with its protocol
	Listen string `json:"listen"`
	VM     string `json:"vm"`
}

func (a *app) portCommand() *cobra.Command {
	return &cobra.Command{
		Use: "port NAME [PORT[/PROTOCOL]]", Short: "List the published ports of a VM", Args: cobra.RangeArgs(1, 2), ValidArgsFunction: a.firstArg(a.completeVM),
		Long: `List the ports of a VM that "drowse serve" publishes, as "run --publish" or its network policy says.
"drowse port-forward" carries others.`,
		RunE: a.onHost(func(_ *cobra.Command, args []string, s *sandbox.Host) error {
			r, err := s.State.Get(args[0])
			if err != nil {
				return err
			}
			var rows []portRow
			if r.Spec.Policy != nil {
				for _, p := range r.Spec.Policy.Publish {
					row := portRow{Port: fmt.Sprintf("%d/%s", p.Port, p.Protocol), Listen: p.Listen.String(), VM: args[0]}
					if len(args) < 2 || args[1] == row.Port || args[1]+"/tcp" == row.Port {
						rows = append(rows, row)
					}
				}
			}
			if len(rows) == 0 && len(args) == 2 {
				return fmt.Errorf("VM %s publishes no port %s: see `drowse port %s`, or use `drowse port-forward %s 8080:%s`", args[0], args[1], args[0], args[0], strings.TrimSuffix(args[1], "/tcp"))
			}
			return a.print(some(rows), func(w io.Writer) {
				for _, r := range rows {
					if len(args) == 2 {
						fmt.Fprintln(w, r.Listen)
					} else {
						fmt.Fprintf(w, "%s -> %s\n", r.Port, r.Listen)
					}
				}
			})
		}),
	}
}

// parseSignal returns a signal by its number or its name in signal(7).
func parseSignal(s string) (int, error) {
	n := 0
	if _, err := fmt.Sscanf(s, "%d", &n); err == nil && fmt.Sprint(n) == s {
		if n < 1 || n > 64 {
			return 0, usageError{fmt.Errorf("--signal %s: use 1 to 64", s)}
		}
		return n, nil
	}
	name := "SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG")
	if sig := unix.SignalNum(name); sig != 0 {
		return int(sig), nil
	}
	return 0, usageError{fmt.Errorf("--signal %q: use one such as TERM, HUP or 9", s)}
}

func (a *app) killCommand() *cobra.Command {
	signal := "KILL"
	cmd := &cobra.Command{
		Use: "kill NAME...", Short: "End VMs at once, as if their power were cut, or send a signal to their command", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		Long: `End VMs at once, as if their power were cut: what was not written to their disks is lost. With
--signal, the command that "drowse run" has started gets the signal, and the VM runs on.`,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			number, err := parseSignal(signal)
			if err != nil {
				return err
			}
			return each(a, args, "killed", func(name string) (map[string]string, error) {
				out := map[string]string{"name": name}
				if number == int(unix.SIGKILL) {
					out["phase"] = string(state.Stopped)
					return out, s.Sandbox(name).Kill(cmd.Context())
				}
				client, err := s.Sandbox(name).Agent(cmd.Context()) // a sleeping VM sleeps on
				if err != nil {
					return nil, err
				}
				defer client.Close()
				if err := client.Kill(cmd.Context(), mainID, number); err != nil {
					return nil, fmt.Errorf("sending a signal to the command of VM %s: %w: `drowse exec %s kill` reaches other processes", name, err, name)
				}
				return out, nil
			}, func(w io.Writer, v map[string]string) { fmt.Fprintln(w, v["name"]) })
		}),
	}
	cmd.Flags().StringVarP(&signal, "signal", "s", signal, "signal for the command, such as TERM or 15; KILL ends the VM")
	return cmd
}

// complete* are the words to which a shell completes.
func (a *app) completeSnapshot(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return completions(a.store, func(s *sandbox.Host) (ids []string) {
		list, _ := s.State.Snapshots()
		for _, i := range list {
			ids = append(ids, i.ID+"\t"+printable(strings.TrimSpace(i.VM+" "+i.Note)))
		}
		return ids
	})
}

func (a *app) completeVolume(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return completions(a.store, func(s *sandbox.Host) (names []string) {
		list, _ := s.State.Volumes().List()
		for _, v := range list {
			names = append(names, v.Name)
		}
		return names
	})
}

// firstArg completes the first argument only; files complete the others.
func (a *app) firstArg(words cobra.CompletionFunc) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return words(cmd, args, typed)
	}
}

// completePath completes NAME: of a path in a VM, and files of the host.
func (a *app) completePath(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if strings.ContainsAny(typed, ":/.") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	names, _ := a.completeVM(cmd, args, typed)
	var out []string
	for _, n := range names {
		name, _, _ := strings.Cut(n, "\t")
		out = append(out, name+":")
	}
	entries, _ := os.ReadDir(".")
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out, cobra.ShellCompDirectiveNoSpace | cobra.ShellCompDirectiveNoFileComp
}

// completeFlags completes the values of flags that several commands have.
func (a *app) completeFlags(cmd *cobra.Command) {
	fixed := func(words ...string) cobra.CompletionFunc {
		return func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return words, cobra.ShellCompDirectiveNoFileComp
		}
	}
	for name, words := range map[string]cobra.CompletionFunc{
		"class": fixed("ephemeral", "resumable", "workspace"), "net": fixed("none", netOpen, "tap"), "pull": fixed(pullMissing, pullAlways, pullNever),
		"hooks": fixed("require", "ignore", "skip"), "from-disk": a.completeSnapshot,
		"volume": func(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
			if strings.HasPrefix(typed, "/") || strings.HasPrefix(typed, ".") {
				return nil, cobra.ShellCompDirectiveDefault
			}
			names, d := a.completeVolume(cmd, args, typed)
			for i := range names {
				names[i] += ":"
			}
			return names, d | cobra.ShellCompDirectiveNoSpace
		},
	} {
		if cmd.Flags().Lookup(name) != nil {
			_ = cmd.RegisterFlagCompletionFunc(name, words) // it fails only for a flag that does not exist
		}
	}
}
