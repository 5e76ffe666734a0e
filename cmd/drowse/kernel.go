package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/rootfs/kernel"
)

func (a *app) kernelCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "kernel", Short: "Build, fetch and list guest kernels", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(a.kernelBuildCommand(), a.kernelFetchCommand(), a.kernelListCommand())
	return cmd
}

func downloads(stage string) bool { return stage == "download" }

func (a *app) kernelBuildCommand() *cobra.Command {
	var (
		jobs    int
		install bool
		tarball string
	)
	cmd := &cobra.Command{
		Use:   "build",
		Short: "Build the small guest kernel from Debian's kernel source",
		Long: `Build the small guest kernel from Debian's kernel source, or find it in the cache if
nothing that it is made from has changed. It runs on every kind of KVM.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if jobs < 0 {
				return usageError{fmt.Errorf("--jobs %d: give how many compilers are to run at once, or 0 for one on each CPU", jobs)}
			}
			s, err := a.store()
			if err != nil {
				return err
			}
			p := a.newProgress("kernel build", downloads)
			k, err := kernel.Build(cmd.Context(), kernel.BuildOptions{
				CacheDir: s.KernelDir(), Jobs: jobs, InstallDeps: install, SourceTarball: tarball,
				Progress: p.report, Log: p.toolLog(a),
			})
			p.finish(err)
			return a.printKernel(k, err)
		},
	}
	f := cmd.Flags()
	f.IntVarP(&jobs, "jobs", "j", 0, "compilers that run at once (default: one on each CPU)")
	f.BoolVar(&install, "install-deps", false, "install missing build tools with apt-get, as root")
	f.StringVar(&tarball, "source", "", "linux-*.tar.xz to build from instead of Debian's package")
	return cmd
}

func (a *app) kernelFetchCommand() *cobra.Command {
	var update bool
	cmd := &cobra.Command{
		Use:   "fetch",
		Short: "Fetch Debian's stock cloud kernel, which runs on hardware KVM",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			p := a.newProgress("kernel fetch", downloads)
			k, err := kernel.Fetch(cmd.Context(), kernel.FetchOptions{
				CacheDir: s.KernelDir(), UpdateIndex: update, Progress: p.report, Log: p.toolLog(a),
			})
			p.finish(err)
			return a.printKernel(k, err)
		},
	}
	cmd.Flags().BoolVar(&update, "update-index", false, "run apt-get update, as root, if apt does not know the kernel or its file is gone")
	return cmd
}

func (a *app) printKernel(k *kernel.Kernel, err error) error {
	if err != nil {
		return err
	}
	return a.print(k, func(w io.Writer) { fmt.Fprintln(w, k.ID) })
}

func (a *app) kernelListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the kernels that have been built and fetched", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			s, err := a.store()
			if err != nil {
				return err
			}
			list, err := kernel.List(s.KernelDir())
			if err != nil {
				return err
			}
			if list == nil {
				list = []*kernel.Kernel{}
			}
			return a.print(list, func(w io.Writer) {
				t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
				fmt.Fprintln(t, "ID\tKIND\tVERSION\tSIZE\tCREATED")
				for _, k := range list {
					fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", k.ID, k.Kind, k.Version, bytesText(k.ImageSize), k.Created.Local().Format("2006-01-02 15:04"))
				}
				t.Flush()
			})
		},
	}
}
