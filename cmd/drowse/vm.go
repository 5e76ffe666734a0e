package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/sandbox/lifetime"
	"github.com/drowse-vm/drowse/sandbox/records"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

const bootTimeout = 5 * time.Minute

func (a *app) runCommand() *cobra.Command {
	var (
		want     spec.VM
		config   string
		fromDisk string
		boot     bool
		mounts   []string
		shares   []string
		secrets  []string
		ports    []string
		net      netFlags
		pull     pullFlags
		limit    time.Duration
		main     mainFlags
		label    metadataFlags
		tags     []string
	)
	cmd := &cobra.Command{
		Use: "run [flags] IMAGE [COMMAND [ARG...]]", Annotations: makesState,
		Short: "Make a VM from an image, boot it, and run a command in it",
		Long: `Make a VM from an image, boot it, and run a command in it, as "docker run" does: flags stand before
IMAGE, and all that follows IMAGE is the command. An image that is missing is pulled.

Without COMMAND it is the image's own; an entrypoint of the image gets COMMAND as its arguments.
The exit status is that of the command, as with "drowse exec". With --detach the VM's name is
printed and the command runs on, see "drowse attach"; an image that says nothing to run then only
boots. Unlike a container, the VM outlives its command, unless --rm is given, and variables,
user and directory are those of the command alone.

A VM has no network but by --net open, --allow, --policy and --publish. What stands in none of
them is denied, in both directions.

A config file (--config) is a JSON object with the fields name, image, kernel, vcpus,
memory_mib, disk_mib, hostname, network, ipv6, policy, tags, cmdline, no_acpi, hooks, idle,
volumes, shares, services. Flags override it.

The class decides what happens at the end. An ephemeral VM is removed with everything about it
when it ends or expires (--ttl). A resumable VM is put to sleep when it expires, and removed a day
later (--keep expired=TIME). A workspace is put to sleep and never removed. "drowse prune" does
this, and "drowse serve" every minute.`,
		Example: `  drowse run -it --rm python:3.12 bash
  drowse run -d --name web -p 8080:80 nginx
  drowse run --rm --allow pypi.org -v ./work:/work -w /work python:3.12 python3 build.py
  drowse run -d --class resumable --owner build --ttl 12h --sleep-after 10m --keep last=5 app`,
		Args: cobra.ArbitraryArgs, ValidArgsFunction: a.firstArg(a.completeImage),
		RunE: func(cmd *cobra.Command, args []string) error {
			args, err := main.take(cmd, args, fromDisk != "")
			if err != nil {
				return err
			}
			if err := pull.check(); err != nil {
				return err
			}
			if want.Volumes, want.Shares, err = parseMounts(mounts); err != nil {
				return err
			}
			more, err := parsed(shares, spec.ParseShare)
			if err != nil {
				return err
			}
			want.Shares = append(want.Shares, more...)
			published, err := parsed(ports, parsePublish)
			if err != nil {
				return usageError{err}
			}
			if want.Policy, want.Network, err = net.read(); err != nil {
				return err
			}
			full, err := readConfig(config, cmd, want, args)
			if err != nil {
				return err
			}
			if len(published) > 0 {
				if full.Network == spec.NetworkNone {
					return usageError{errors.New("--publish needs a network: leave out --net none")}
				}
				p := netpolicy.Policy{}
				if full.Policy != nil {
					p = *full.Policy
				}
				p.Publish = slices.Concat(p.Publish, published)
				full.Policy, full.Network = &p, spec.NetworkTAP
			}
			if full.Image == "" && fromDisk == "" {
				return usageError{errors.New("no image is named: see `drowse run --help`")}
			}
			// Tags count only in a policy, which needs a network.
			if full.Network == spec.NetworkTAP {
				if cmd.Flags().Changed("tag") {
					full.Tags = tags
				}
			} else {
				label.tags = tags
			}
			var own *spec.Metadata
			if label.given(cmd) || len(label.tags) > 0 {
				l, err := label.label(time.Now())
				if err != nil {
					return err
				}
				if l.Persist, err = label.persist.over(cmd, lifetime.Persist{}); err != nil {
					return err
				}
				own = &l
			}
			if err := checkSpec(full); err != nil {
				return err
			}
			vars, err := variables(main.envFile, main.cmd.Env, os.Stdin)
			if err != nil {
				return err
			}
			main.cmd.Env = vars
			p, err := a.place()
			if err != nil {
				return err
			}
			return p.run(cmd.Context(), &runRequest{spec: full, metadata: own, disk: fromDisk, boot: boot, pull: pull, secrets: secrets, limit: limit, main: &main, published: len(published) > 0})
		},
	}
	secretFlag(cmd, &secrets, " once it runs (see \"drowse secret\")")
	f := cmd.Flags()
	f.SetInterspersed(false)
	f.SetNormalizeFunc(dockerNames)
	f.Bool("help", false, "help for run") // without -h, which is docker's for --hostname
	main.add(cmd)
	pull.add(cmd)
	f.StringVar(&want.Name, "name", "", "name of the VM (default: made up)")
	f.StringVar(&want.Kernel, "kernel", "", "built, debian, an id of \"drowse kernel ls\", or a path")
	f.Var((*cpus)(&want.VCPUs), "vcpus", fmt.Sprintf("number of CPUs, 1 to 8; also --cpus (default %d)", spec.DefaultVCPUs))
	f.VarP((*mebibytes)(&want.MemoryMiB), "memory", "m", fmt.Sprintf("RAM, 64m to 16g; a number alone is MiB (default %d)", spec.DefaultMemoryMiB))
	f.Var((*mebibytes)(&want.DiskMiB), "disk", fmt.Sprintf("size of the writable disk, such as 20g; a number alone is MiB (default %d)", spec.DefaultDiskMiB))
	f.Var((*mebibytes)(&want.DiskQuotaMiB), "disk-quota", "most that the VM may make the host store (disk, snapshots, logs, promotions), such as 20g; a number alone is MiB")
	f.StringVarP(&want.Hostname, "hostname", "h", "", "host name in the guest (default: the VM's name)")
	net.add(cmd, "", "everything is denied")
	f.StringArrayVarP(&ports, "publish", "p", nil, "[ADDRESS:]PORT:GUESTPORT[/udp]: have \"drowse serve\" listen on the host, on all addresses by default; repeatable")
	f.BoolVar(&want.IPv6, "ipv6", false, "with a network: IPv6 as well")
	label.add(cmd, "let it expire after this time, such as 12h or 7d (default: never)")
	f.StringArrayVar(&tags, "tag", nil, "tag, to find it by; with a network, also for policies of other VMs (agents); repeatable")
	f.StringVar(&want.Cmdline, "cmdline", "", "additional kernel parameters")
	f.StringVar((*string)(&want.Hooks.Policy), "hooks", "", "hooks in the guest, and on the host before a sleep: require, ignore or skip (default require)")
	f.IntVar(&want.Hooks.TimeoutSeconds, "hook-timeout", 0, fmt.Sprintf("time limit of one hook, in seconds (default %d)", spec.DefaultHookSeconds))
	f.IntVar(&want.Hooks.AllSeconds, "hooks-timeout", 0, fmt.Sprintf("time limit of all hooks of one event, in seconds (default %d)", spec.DefaultAllSeconds))
	f.BoolVar(&want.NoACPI, "no-acpi", false, "describe devices on the kernel's command line, for kernels without ACPI")
	idleFlags(cmd, &want.Idle, "never")
	f.StringSliceVar(&want.Self.Allow, "allow-self", nil, "what its programs may ask the host to do with it: "+strings.Join([]string{spec.SelfSleep, spec.SelfSnapshot, spec.SelfHold, spec.SelfWake, spec.SelfExtend}, ", ")+"=TIME (in total, such as 24h), "+spec.SelfFork+"=N (simultaneous children; default: nothing)")
	f.StringArrayVarP(&mounts, "volume", "v", nil, "NAME:/PATH[:ro]: mount a volume, or HOSTDIR:/PATH[:ro] a directory of the host, which begins with / or .; repeatable")
	f.StringArrayVar(&shares, "share", nil, "HOSTDIR:/PATH[:rw]: mount a directory of the host, read-only by default; repeatable")
	f.StringVar(&fromDisk, "from-disk", "", "boot from a copy of the disk of this snapshot, with its image")
	f.BoolVar(&boot, "no-template", false, "boot, even if there is a template of an earlier boot (see \"drowse template\")")
	f.StringVar(&config, "config", "", "JSON file that describes the VM, - for stdin")
	f.DurationVar(&limit, "timeout", bootTimeout, "give up if the VM is not up after this time; a pull has its own")
	a.completeFlags(cmd)
	return cmd
}

// runRequest is what "run" shall make and run.
type runRequest struct {
	spec      spec.VM
	metadata  *spec.Metadata // nil is the default
	disk      string         // a snapshot to boot from the disk of
	boot      bool           // without a template
	pull      pullFlags
	secrets   []string
	limit     time.Duration
	main      *mainFlags
	published bool
}

// readConfig merges a config file with the given flags.
func readConfig(path string, cmd *cobra.Command, flags spec.VM, args []string) (spec.VM, error) {
	want := flags
	if path != "" {
		in, err := input(path, os.Stdin)
		if err != nil {
			return want, fmt.Errorf("opening the VM's config: %w", err)
		}
		defer in.Close()
		if want, err = spec.Parse(in); err != nil {
			return want, err
		}
		set := cmd.Flags().Changed
		for _, o := range []struct {
			flag string
			copy func()
		}{
			{"name", func() { want.Name = flags.Name }},
			{"kernel", func() { want.Kernel = flags.Kernel }},
			{"vcpus", func() { want.VCPUs = flags.VCPUs }},
			{"memory", func() { want.MemoryMiB = flags.MemoryMiB }},
			{"disk-quota", func() { want.DiskQuotaMiB = flags.DiskQuotaMiB }},
			{"disk", func() { want.DiskMiB = flags.DiskMiB }},
			{"hostname", func() { want.Hostname = flags.Hostname }},
			{"ipv6", func() { want.IPv6 = flags.IPv6 }},
			{"cmdline", func() { want.Cmdline = flags.Cmdline }},
			{"hooks", func() { want.Hooks.Policy = flags.Hooks.Policy }},
			{"hook-timeout", func() { want.Hooks.TimeoutSeconds = flags.Hooks.TimeoutSeconds }},
			{"hooks-timeout", func() { want.Hooks.AllSeconds = flags.Hooks.AllSeconds }},
			{"sleep-after", func() { want.Idle.SleepSeconds = flags.Idle.SleepSeconds }},
			{"idle-cpu", func() { want.Idle.CPUPercent = flags.Idle.CPUPercent }},

			{"allow-self", func() { want.Self.Allow = flags.Self.Allow }},
			{"no-acpi", func() { want.NoACPI = flags.NoACPI }},
		} {
			if set(o.flag) {
				o.copy()
			}
		}
		if set("volume") || set("share") {
			want.Volumes, want.Shares = flags.Volumes, flags.Shares
		}
		if flags.Network != "" {
			want.Network, want.Policy = flags.Network, flags.Policy
		}
	}
	if len(args) > 0 {
		want.Image = args[0]
	}
	return want, nil
}

// warnUp warns of what did not succeed although the VM runs.
func (a *app) warnUp(up cameUp) {
	a.warnHooks(up.name, up.hooks)
	a.warnNetwork(up.name, up.network)
}

func (a *app) printUp(up cameUp) error {
	a.warnUp(up)
	return a.print(up, func(w io.Writer) { fmt.Fprintln(w, up.name) })
}

// launchingWith calls do with a place that can start VMs, the secrets that words describe, and a time limit.
func (a *app) launchingWith(ctx context.Context, words []string, limit time.Duration, do func(context.Context, place, []spec.Secret) error) error {
	p, err := a.place()
	if err != nil {
		return err
	}
	if err := p.ready(ctx); err != nil {
		return err
	}
	list, err := readSecrets(words, os.Stdin)
	if err != nil {
		return err
	}
	defer wipeSecrets(list)
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return do(ctx, p, list)
}

// vmCommand returns a command on VMs that prints a report for each.
func (a *app) vmCommand(use, short string, do func(context.Context, place, string) (cameUp, error)) *cobra.Command {
	limit := bootTimeout
	var secrets []string
	cmd := &cobra.Command{
		Use: use + " NAME...", Short: short, Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.launchingWith(cmd.Context(), secrets, limit, func(ctx context.Context, p place, list []spec.Secret) error {
				return each(a, args, "vms", func(name string) (cameUp, error) {
					up, err := do(ctx, p, name)
					if err != nil {
						return up, err
					}
					a.warnUp(up)
					return up, handIn(ctx, p, list, up.name)
				}, func(w io.Writer, up cameUp) { fmt.Fprintln(w, up.name) })
			})
		},
	}
	cmd.Flags().DurationVar(&limit, "timeout", limit, "give up after this time")
	secretFlag(cmd, &secrets, " (see \"drowse secret\")")
	return cmd
}

func (a *app) startCommand() *cobra.Command {
	var discard bool
	cmd := a.vmCommand("start", "Boot stopped or crashed VMs with their disks as they are",
		func(ctx context.Context, p place, name string) (cameUp, error) { return p.start(ctx, name, discard) })
	cmd.Flags().BoolVar(&discard, "discard-memory", false, "also boot a sleeping VM, from the disk that it slept with; its memory is lost")
	return cmd
}

func (a *app) wakeCommand() *cobra.Command {
	cmd := a.vmCommand("wake", "Wake sleeping VMs, now or by a timer", func(ctx context.Context, p place, name string) (cameUp, error) { return p.wake(ctx, name) })
	a.timed(cmd)
	var all bool
	cmd.Use = "wake NAME... | --all"
	cmd.Args = func(_ *cobra.Command, args []string) error { return namesOrAll(all, args) }
	cmd.Flags().BoolVar(&all, "all", false, "all sleeping VMs")
	named := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !all {
			return named(cmd, args)
		}
		list, err := a.listed(cmd.Context(), records.Filter{Statuses: []records.Status{records.Asleep}}, true)
		for _, b := range list.Sandboxes {
			args = append(args, b.Name)
		}
		if err != nil || len(args) == 0 {
			return err
		}
		return named(cmd, args)
	}
	return cmd
}

// namesOrAll checks that a command has either names or --all.
func namesOrAll(all bool, names []string) error {
	if all == (len(names) > 0) {
		return errors.New("name a VM, or give --all")
	}
	return nil
}

func (a *app) sleepCommand() *cobra.Command {
	var (
		hooks   string
		all     bool
		limit   time.Duration
		durable bool
	)
	cmd := &cobra.Command{
		Use: "sleep NAME... | --all", Short: "Put VMs to sleep: write them to disk and end their processes", ValidArgsFunction: a.completeVM,
		Args: func(_ *cobra.Command, args []string) error { return namesOrAll(all, args) },
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := a.place()
			if err != nil {
				return err
			}
			ctx := cmd.Context()
			if limit > 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, limit)
				defer cancel()
			}
			o := spec.SleepOptions{Hooks: spec.HookPolicy(hooks), Durable: durable}
			if all {
				return a.sleepAll(ctx, p, o)
			}
			return each(a, args, "vms", func(name string) (res spec.SleepResult, err error) {
				if res, err = p.Sleep(ctx, name, o); err != nil {
					return res, err
				}
				a.warnHooks(res.Name, res.Hooks)
				a.warnHostHooks(res.Name, res.HostHooks)
				a.warnPersisted(res.Name, res.Persist)
				if res.Problem != "" {
					a.log.Warn("the VM sleeps, and not all could be done after that", "vm", res.Name, "problem", res.Problem)
				}
				return res, nil
			}, func(w io.Writer, res spec.SleepResult) {
				printPersisted(w, res.Persist)
				fmt.Fprintf(w, "%s asleep in snapshot %s (%s of memory in %s)\n", res.Name, res.Snapshot, bytesText(int64(res.BytesRaw)), bytesText(res.BytesStored))
			})
		},
	}
	hooksFlag(cmd, &hooks)
	cmd.Flags().BoolVar(&durable, "durable", false, "also share them with the hosts of the cluster (\"drowse serve --cluster\"), and wait until these can wake them")
	cmd.Flags().BoolVar(&all, "all", false, "all running VMs, as before a shutdown of the host")
	cmd.Flags().DurationVar(&limit, "timeout", 0, "give up after this time; a VM that is not asleep by then runs on")
	return cmd
}

// sleepAll puts all running VMs to sleep.
func (a *app) sleepAll(ctx context.Context, p place, o spec.SleepOptions) error {
	asleep, awake, err := p.sleepAll(ctx, o)
	if err != nil {
		return err
	}
	err = a.print(map[string][]string{"asleep": asleep, "awake": awake}, func(w io.Writer) {
		for _, name := range asleep {
			fmt.Fprintln(w, name)
		}
	})
	if len(awake) > 0 {
		err = errors.Join(err, fmt.Errorf("%d of %d VMs were not put to sleep and run on: %s: see above for why", len(awake), len(awake)+len(asleep), strings.Join(awake, ", ")))
	}
	return err
}

// ended is a VM that does not run any more, in JSON.
type ended struct {
	Name   string         `json:"name"`
	Status records.Status `json:"status"`
}

func (a *app) stopCommand() *cobra.Command {
	limit := 30 * time.Second
	cmd := &cobra.Command{
		Use: "stop NAME...", Short: "Shut VMs down", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			return each(a, args, "vms", func(name string) (ended, error) {
				err := p.stop(cmd.Context(), name, limit)
				if errors.Is(err, context.DeadlineExceeded) {
					err = fmt.Errorf("%s has not shut down within %v: give it longer with --timeout, or use `drowse kill %s`", name, limit, name)
				}
				return ended{name, records.Stopped}, err
			}, func(w io.Writer, e ended) { fmt.Fprintln(w, e.Name) })
		}),
	}
	cmd.Flags().DurationVar(&limit, "timeout", limit, "time limit for each")
	return cmd
}

func (a *app) killCommand() *cobra.Command {
	signal := "KILL"
	cmd := &cobra.Command{
		Use: "kill NAME...", Short: "End VMs at once, as if their power were cut, or send a signal to their command", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		Long: `End VMs at once, as if their power were cut: what was not written to their disks is lost. With
--signal, the command that "drowse run" has started gets the signal, and the VM runs on.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			number, err := parseSignal(signal)
			if err != nil {
				return err
			}
			return each(a, args, "killed", func(name string) (ended, error) {
				if number == sigKill {
					return ended{name, records.Stopped}, p.kill(cmd.Context(), name)
				}
				return ended{name, records.Running}, p.signal(cmd.Context(), name, mainID, number)
			}, func(w io.Writer, e ended) { fmt.Fprintln(w, e.Name) })
		}),
	}
	cmd.Flags().StringVarP(&signal, "signal", "s", signal, "signal for the command, such as TERM or 15; KILL ends the VM")
	return cmd
}

// signalError is an error of the command's signal.
func signalError(vm string, err error) error {
	return fmt.Errorf("sending a signal to the command of VM %s: %w: `drowse exec %s kill` reaches other processes", vm, err, vm)
}

// signals are the names of signal(7) on the guest's Linux, without SIG: this system may number them otherwise.
var signals = strings.Fields("HUP INT QUIT ILL TRAP ABRT BUS FPE KILL USR1 SEGV USR2 PIPE ALRM TERM STKFLT CHLD CONT STOP TSTP TTIN TTOU URG XCPU XFSZ VTALRM PROF WINCH IO PWR SYS")

const sigKill = 9

// parseSignal returns a signal by its number or its name in signal(7).
func parseSignal(s string) (int, error) {
	n := 0
	if _, err := fmt.Sscanf(s, "%d", &n); err == nil && fmt.Sprint(n) == s {
		if n < 1 || n > 64 {
			return 0, usageError{fmt.Errorf("--signal %s: use 1 to 64", s)}
		}
		return n, nil
	}
	if i := slices.Index(signals, strings.TrimPrefix(strings.ToUpper(s), "SIG")); i >= 0 {
		return i + 1, nil
	}
	return 0, usageError{fmt.Errorf("--signal %q: use one such as TERM, HUP or 9", s)}
}

func (a *app) rmCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use: "rm NAME...", Short: "Delete VMs with their disks", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			return removeAll(a, args, func(name string) (string, error) {
				freed, err := p.remove(cmd.Context(), name, force)
				for _, p := range freed.Problems {
					a.log.Warn("removed, but not all could be done", "name", name, "cause", printable(p))
				}
				return name, err
			})
		}),
	}
	cmd.Flags().BoolVarP(&force, "force", "f", false, "also delete running VMs")
	return cmd
}

func (a *app) inspectCommand() *cobra.Command {
	return &cobra.Command{
		Use: "inspect NAME...", Short: "Show VMs, as JSON: an object, or a list of several", Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVM,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			var list []json.RawMessage
			var errs []error
			for _, name := range args {
				v, err := p.vm(name).Inspect(cmd.Context())
				if err != nil {
					errs = append(errs, err)
					continue
				}
				list = append(list, v)
			}
			switch {
			case len(args) > 1:
				errs = append(errs, printJSON(a.stdout, some(list)))
			case len(list) > 0:
				_, err := fmt.Fprintf(a.stdout, "%s\n", bytes.TrimRight(list[0], "\n"))
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		}),
	}
}

func (a *app) completeVM(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	return completions(a.place, func(p place) (names []string) {
		list, _ := allOf(cmd.Context(), p, records.Filter{}) // only the readable ones
		for _, b := range list.Sandboxes {
			names = append(names, b.Name+"\t"+string(b.Status))
		}
		return names
	})
}
