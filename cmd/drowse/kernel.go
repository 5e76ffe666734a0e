//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox"
)

func (a *app) kernelCommand() *cobra.Command {
	return group(&cobra.Command{
		Use: "kernel", Short: "Build, fetch, list and inspect guest kernels",
	}, a.kernelBuildCommand(), a.kernelFetchCommand(), a.kernelListCommand(), a.kernelInspectCommand())
}

func (a *app) kernelBuildCommand() *cobra.Command {
	var (
		jobs    int
		install bool
		update  bool
		tarball string
		config  string
		shared  string
	)
	cmd := &cobra.Command{
		Use: "build", Annotations: makesState,
		Short: "Build the small guest kernel from Debian's kernel source",
		Long: `Build the small guest kernel from Debian's kernel source, unless the cache has one with this
program's patches and options. It runs on every kind of KVM. With --update, the cached kernel
must also be of Debian's newest source and of the same compiler.

--config takes a file with kernel options in .config format, which override those of drowse. VMs
that name such a kernel (run --kernel ID) and images that need its features use it; others keep
the usual one. See docs/reference/KERNELS.md.`,
		Example: `  drowse kernel build --install-deps
  apt-get update && drowse kernel build --update
  echo CONFIG_VXLAN=y | drowse kernel build --config -`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if jobs < 0 {
				return usageError{fmt.Errorf("--jobs %d: give how many compilers are to run at once, or 0 for one on each CPU", jobs)}
			}
			s, err := a.store()
			if err != nil {
				return err
			}
			own, err := readOwnConfig(cmd.InOrStdin(), config)
			if err != nil {
				return err
			}
			p := a.newProgress("kernel build")
			k, err := kernel.Build(cmd.Context(), kernel.BuildOptions{
				CacheDir: s.State.KernelDir(), SharedDir: shared, Jobs: jobs, InstallDeps: install, SourceTarball: tarball, Config: own,
				Update: update, Newer: p.newer,
				Progress: p.report, Log: p.toolLog(a),
			})
			p.finish(err)
			return a.answerKernel(k, err)
		},
	}
	f := cmd.Flags()
	f.IntVarP(&jobs, "jobs", "j", 0, "parallel compilers (default: one for each CPU)")
	f.BoolVar(&install, "install-deps", false, "install missing build tools with apt-get, as root")
	f.BoolVar(&update, "update", false, "build from the newest source that apt knows, even if the cache has an older kernel")
	f.StringVar(&tarball, "source", "", "linux-*.tar.xz to use instead of Debian's package")
	f.StringVar(&config, "config", "", "file with additional kernel options, - for stdin")
	f.StringVar(&shared, "share", "", "directory that shares kernels between state directories")
	return cmd
}

// maxOwnConfig bounds a file of kernel options, in bytes. A whole .config takes a quarter of it.
const maxOwnConfig = 1 << 20

// readOwnConfig reads the file of --config. "" means none, and "-" means in.
func readOwnConfig(in io.Reader, path string) (string, error) {
	if path == "" {
		return "", nil
	}
	text, err := readInput("the kernel's options", path, in, maxOwnConfig)
	switch {
	case err != nil:
		return "", err
	case len(text) > maxOwnConfig:
		return "", usageError{fmt.Errorf("--config %s: more than %d bytes", path, maxOwnConfig)}
	case len(bytes.TrimSpace(text)) == 0:
		return "", usageError{fmt.Errorf("--config %s: it is empty: use lines like CONFIG_VXLAN=y", path)}
	}
	return string(text), nil
}

func (a *app) kernelFetchCommand() *cobra.Command {
	var (
		index   bool
		update  bool
		modules []string
	)
	cmd := &cobra.Command{
		Use: "fetch", Annotations: makesState,
		Short: "Fetch Debian's stock cloud kernel, which runs on hardware KVM",
		Long: `Fetch Debian's stock cloud kernel, unless the cache has it. It runs on KVM with VMX or SVM. With
--update, the cached kernel must be the newest that apt knows. Its drivers are modules: a VM
loads those that it needs at boot, and those of --module. "drowse kernel inspect" lists the
modules of each feature.`,
		Example: `  drowse kernel fetch
  drowse kernel fetch --module veth,bridge,br_netfilter,nft_compat`,
		Args: cobra.NoArgs,
		RunE: a.onHost(func(cmd *cobra.Command, _ []string, s *sandbox.Host) error {
			p := a.newProgress("kernel fetch")
			k, err := kernel.Fetch(cmd.Context(), kernel.FetchOptions{
				CacheDir: s.State.KernelDir(), Update: update, Newer: p.newer, UpdateIndex: index, ExtraModules: modules, Progress: p.report, Log: p.toolLog(a),
			})
			p.finish(err)
			return a.answerKernel(k, err)
		}),
	}
	cmd.Flags().StringSliceVar(&modules, "module", nil, "additional modules to load at boot, with their dependencies")
	cmd.Flags().BoolVar(&update, "update", false, "fetch the newest kernel that apt knows, even if the cache has an older one")
	cmd.Flags().BoolVar(&index, "update-index", false, "run apt-get update, as root, if apt does not know the kernel or its file is missing")
	return cmd
}

func (a *app) answerKernel(k *kernel.Kernel, err error) error {
	return a.answer(k, err, func(w io.Writer) { fmt.Fprintln(w, k.ID) })
}

func (a *app) kernelListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List kernels", Args: cobra.NoArgs,
		RunE: a.onHost(func(_ *cobra.Command, _ []string, s *sandbox.Host) error {
			list, err := kernel.List(s.State.KernelDir())
			return answerList(a, list, err, "ID\tKIND\tVERSION\tRUNS ON KVM\tSIZE\tCREATED", func(k *kernel.Kernel) []any {
				return []any{k.ID, kindText(k), k.Version, hostsText(k.Hosts()), bytesText(k.ImageSize), k.Created.Local().Format(dayMinute)}
			})
		}),
	}
}

// kernelInfo is a kernel as JSON: its record, and what follows from its configuration.
type kernelInfo struct {
	*kernel.Kernel
	Hosts    []kernel.Host    `json:"hosts"`    // kinds of KVM on which it runs
	Own      bool             `json:"own"`      // it was built with --config
	Features []kernel.Feature `json:"features"` // features that a guest may need
	Lacks    []string         `json:"lacks"`    // names of features that it lacks, or lacks until a module is loaded
}

func (a *app) kernelInspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect KERNEL", Short: "Show a kernel: version, digests, source, hosts, features",
		Long: `Show a kernel: version, digests, source, the kinds of KVM that it runs on, and the features of its
configuration. KERNEL is an id of "drowse kernel ls", the beginning of one, or "built" or
"debian" for the newest of its kind. The kernel's file is checked against its digest.`,
		Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeKernel,
		RunE: a.onHost(func(cmd *cobra.Command, args []string, s *sandbox.Host) error {
			k, err := kernel.Find(s.State.KernelDir(), args[0])
			if err != nil {
				return err
			}
			if err := k.Verify(cmd.Context()); err != nil {
				return err
			}
			features, err := k.Features()
			if err != nil {
				return err
			}
			info := kernelInfo{Kernel: k, Hosts: k.Hosts(), Own: k.Own(), Features: features, Lacks: []string{}}
			for _, f := range features {
				if f.Has != kernel.Yes {
					info.Lacks = append(info.Lacks, f.Name)
				}
			}
			return a.print(info, func(w io.Writer) { printKernelInfo(w, info) })
		}),
	}
}

func kindText(k *kernel.Kernel) string {
	if k.Own() {
		return string(k.Kind) + ", own options"
	}
	return string(k.Kind)
}

func hostsText(hosts []kernel.Host) string {
	var out []string
	for _, h := range hosts {
		out = append(out, string(h))
	}
	return strings.Join(out, ", ")
}

func printKernelInfo(w io.Writer, k kernelInfo) {
	t := columns(w)
	row := func(name, value string) { fmt.Fprintf(t, "%s\t%s\n", name, printable(value)) }
	row("id", k.ID)
	row("kind", kindText(k.Kernel))
	row("version", k.Version)
	row("runs on KVM", hostsText(k.Hosts))
	row("image", fmt.Sprintf("%s, %s", filepath.Base(k.Image), bytesText(k.ImageSize)))
	row("sha256", k.ImageSHA256)
	row("config", k.Config)
	for _, name := range []string{"source", "package"} {
		if v := k.Inputs[name]; v != "" {
			row(name, v)
		}
	}
	row("inputs", k.InputsHash)
	row("created", k.Created.Local().Format(dayMinute))
	var modules []string
	for _, m := range k.Modules {
		modules = append(modules, strings.TrimSuffix(filepath.Base(m), ".ko"))
	}
	if len(modules) > 0 {
		row("loads", strings.Join(modules, " "))
	}
	t.Flush()
	fmt.Fprintln(w)
	table(w, "FEATURE\tHAS\tFOR\tLACKS", k.Features, func(f kernel.Feature) []any {
		lacks := strings.Join(f.Lacks(), " ")
		if m := f.Modules(); len(m) > 0 {
			lacks = "--module " + strings.Join(m, ",")
		}
		return []any{f.Name, f.Has, f.Purpose, lacks}
	})
}

// completeKernel completes a kernel id.
func (a *app) completeKernel(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	return completions(a.store, func(s *sandbox.Host) []string {
		ids := []string{string(kernel.Built), string(kernel.Debian)}
		list, _ := kernel.List(s.State.KernelDir()) // only the readable ones
		for _, k := range list {
			ids = append(ids, k.ID)
		}
		return ids
	})
}
