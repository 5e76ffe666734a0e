package main

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/drowse-vm/drowse/guest/report"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

func (a *app) statsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stats NAME", Short: "Show what a running VM uses: processor, memory, disk, network", Args: cobra.ExactArgs(1), ValidArgsFunction: a.completeVM,
		Long: `Show what a running VM uses, as guest and host count it, since the guest booted or the VM's
process began. drowse measures once, now; nothing in the guest runs for it before or after. A
sleeping VM is not woken.`,
		RunE: a.there(func(cmd *cobra.Command, args []string, p place) error {
			st, err := p.Stats(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if st.Problem != "" {
				a.log.Warn("the guest could not be asked", "vm", st.Name, "problem", st.Problem)
			}
			return a.print(st, func(w io.Writer) { writeVMStats(w, st) })
		}),
	}
}

// took formats a time in milliseconds for people.
func took(ms float64) string {
	d := time.Duration(ms * float64(time.Millisecond))
	if d >= time.Minute {
		return d.Round(time.Second).String()
	}
	return d.Round(10 * time.Millisecond).String()
}

// sizeText formats a size that comes from a report.
func sizeText(n uint64) string {
	const most = 1<<63 - 1
	return bytesText(int64(min(n, most)))
}

func writeVMStats(w io.Writer, st spec.Stats) {
	h := st.Host
	fmt.Fprintf(w, "process  pid %d, for %s, processor %s user and %s system\n", h.PID, took(h.AwakeMs), took(h.CPUUserMs), took(h.CPUSystemMs))
	fmt.Fprintf(w, "         memory %s private, %s shared, %s swapped\n", sizeText(h.MemoryPrivate), sizeText(h.MemoryShared), sizeText(h.MemorySwapped))
	fmt.Fprintf(w, "         stored on the host %s", bytesText(h.DiskUsed))
	if h.DiskQuota > 0 {
		fmt.Fprintf(w, " of %s", bytesText(h.DiskQuota))
	}
	fmt.Fprintln(w)
	if h.CPUThrottledMs > 0 || h.DiskRead > 0 || h.DiskWritten > 0 {
		fmt.Fprintf(w, "         held up %s by its limit of processors, disk %s read and %s written\n", took(h.CPUThrottledMs), bytesText(h.DiskRead), bytesText(h.DiskWritten))
	}
	if h.Faults > 0 || h.MiBTouched > 0 {
		fmt.Fprintf(w, "         since it came back: %d page faults, %.1f MiB loaded\n", h.Faults, h.MiBTouched)
	}
	if st.Guest != nil {
		writeGuestStats(w, st.Guest)
	}
}

func writeGuestStats(w io.Writer, g *report.Stats) {
	c, m := g.CPU, g.Memory
	fmt.Fprintf(w, "guest    up %s, %d CPUs, load %.2f %.2f %.2f\n", took(g.UptimeMs), g.CPUs, g.Load1, g.Load5, g.Load15)
	fmt.Fprintf(w, "         %d tasks, %d running, %d made since boot, %d killed for want of memory\n", g.Tasks, g.TasksRunning, g.Forks, g.OOMKills)
	fmt.Fprintf(w, "         processor %s user, %s system, %s idle, %s waiting for disks, %s interrupts, %s stolen\n",
		took(c.User), took(c.System), took(c.Idle), took(c.IOWait), took(c.IRQ), took(c.Steal))
	fmt.Fprintf(w, "         memory %s, %s available, %s free, %s cached, %d major faults\n",
		sizeText(m.Total), sizeText(m.Available), sizeText(m.Free), sizeText(m.Cached), g.MajorFaults)
	tableIfAny(w, "FILE SYSTEM\tTYPE\tSIZE\tUSED\tAVAILABLE\tINODES FREE", g.FileSystems, func(f report.FileSystem) []any {
		return []any{f.Path, f.Type, sizeText(f.Size), sizeText(f.Size - min(f.Free, f.Size)), sizeText(f.Available), f.InodesFree}
	})
	tableIfAny(w, "DISK\tREADS\tREAD\tWRITES\tWRITTEN", g.Disks, func(d report.Disk) []any {
		return []any{d.Name, d.Reads, sizeText(d.ReadBytes), d.Writes, sizeText(d.WrittenBytes)}
	})
	tableIfAny(w, "INTERFACE\tRECEIVED\tPACKETS\tERRORS\tDROPPED\tSENT\tPACKETS\tERRORS\tDROPPED", g.Interfaces, func(i report.Interface) []any {
		return []any{
			i.Name, sizeText(i.ReceivedBytes), i.ReceivedPackets, i.ReceivedErrors, i.ReceivedDropped,
			sizeText(i.SentBytes), i.SentPackets, i.SentErrors, i.SentDropped,
		}
	})
}
