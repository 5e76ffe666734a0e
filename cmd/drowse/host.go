package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/sandbox/api/wire"
	"github.com/drowse-vm/drowse/sandbox/records"
)

// versionDoc says what this program was built from.
type versionDoc struct {
	Version string `json:"version"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
	// Server and its version, if one is asked.
	Server        string `json:"server,omitempty"`
	ServerVersion string `json:"server_version,omitempty"`
}

func thisVersion() versionDoc {
	return versionDoc{Version: version(), Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
}

func (a *app) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Show the version of drowse", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			v := thisVersion()
			at, err := a.server()
			if err == nil && at != nil {
				v.Server = at.String()
				var is wire.Is
				c := at.client()
				defer c.Close()
				is, err = c.Version(cmd.Context())
				v.ServerVersion = is.Version
			}
			return errors.Join(a.print(v, func(w io.Writer) {
				fmt.Fprintf(w, "drowse %s, %s, %s/%s\n", v.Version, v.Go, v.OS, v.Arch)
				if v.ServerVersion != "" {
					fmt.Fprintf(w, "server %s, %s\n", v.ServerVersion, v.Server)
				}
			}), err)
		},
	}
}

// infoDoc is `drowse info -o json`.
type infoDoc struct {
	versionDoc
	// State, Kernel and CPUs are of this host, if no server is asked.
	State     string         `json:"state,omitempty"`
	Kernel    string         `json:"host_kernel,omitempty"`
	CPUs      int            `json:"cpus,omitempty"`
	VMs       map[string]int `json:"vms"` // by status
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
		RunE: a.there(func(cmd *cobra.Command, _ []string, p place) error {
			i, err := p.info(cmd.Context())
			return errors.Join(err, a.print(i, func(w io.Writer) {
				t := columns(w)
				defer t.Flush()
				var words []string
				for _, p := range slices.Sorted(maps.Keys(i.VMs)) {
					words = append(words, fmt.Sprintf("%d %s", i.VMs[p], p))
				}
				fmt.Fprintf(t, "drowse\t%s\n", i.Version)
				if i.Server != "" {
					fmt.Fprintf(t, "server\t%s, %s\n", i.Server, i.ServerVersion)
				} else {
					fmt.Fprintf(t, "host\tLinux %s, %s, %d CPUs\nstate\t%s\n", i.Kernel, i.Arch, i.CPUs, i.State)
				}
				fmt.Fprintf(t, "VMs\t%s\nmemory of running VMs\t%d MiB\nimages\t%d\nsnapshots\t%d\nvolumes\t%d\n", dash(strings.Join(words, ", ")), i.MemoryMiB, i.Images, i.Snapshots, i.Volumes)
			}))
		}),
	}
}

// counted adds the VMs of a place to what is known of it.
func (i *infoDoc) counted(list records.List) {
	i.VMs = map[string]int{}
	for _, b := range list.Sandboxes {
		i.VMs[string(b.Status)]++
		if b.Status == records.Running {
			i.MemoryMiB += b.Memory
		}
	}
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
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			b, err := p.Get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			var rows []portRow
			if b.Policy != "" {
				policy, err := p.Policy(cmd.Context(), args[0])
				if err != nil {
					return err
				}
				for _, p := range policy.Publish {
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

// complete* are the words to which a shell completes.
func (a *app) completeSnapshot(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return completions(a.place, func(p place) (ids []string) {
		list, _ := p.snapshots(cmd.Context())
		for _, i := range list {
			ids = append(ids, i.ID+"\t"+printable(strings.TrimSpace(i.VM+" "+i.Note)))
		}
		return ids
	})
}

func (a *app) completeVolume(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return completions(a.place, func(p place) (names []string) {
		list, _ := p.volumes(cmd.Context()) // only the readable ones
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
