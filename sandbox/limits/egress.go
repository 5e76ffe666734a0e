package limits

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// ledgerEgress is held while what an owner has sent is added up, in the file owners/HASH.egress.
const ledgerEgress = ledgerMemory + 4

// egressPatience is how long an addition waits for others of the same owner, each of which takes milliseconds.
const egressPatience = 10 * time.Second

// sent is the file: what an owner's sandboxes have sent in a day, UTC.
type sent struct {
	Day   string `json:"day"`
	Bytes uint64 `json:"bytes"`
}

func egressPath(dir, owner string) string {
	return strings.TrimSuffix(ownerLedger(dir, owner), ".lock") + ".egress"
}

func readEgress(dir, owner string, now time.Time) (sent, error) {
	today := sent{Day: now.UTC().Format(time.DateOnly)}
	data, err := os.ReadFile(egressPath(dir, owner))
	if errors.Is(err, fs.ErrNotExist) {
		return today, nil
	}
	var last sent
	if err == nil {
		err = json.Unmarshal(data, &last)
	}
	if err != nil {
		return today, fmt.Errorf("%s: %w: mend or remove the file", egressPath(dir, owner), err)
	}
	if last.Day == today.Day {
		today.Bytes = last.Bytes
	}
	return today, nil
}

// AddEgress adds what a VM of an owner has sent, in bytes, to the owner's day, UTC. It fails with spec.ErrQuota, after
// it has added them, if the owner has sent as much as it may. Without a limit, AddEgress does nothing.
func AddEgress(dir, owner string, now time.Time, bytes uint64) error {
	limits, err := Read(dir)
	if err != nil {
		return err
	}
	may := uint64(limits.Of(owner).EgressMiBPerDay) << 20
	if may == 0 {
		return nil
	}
	day, err := addEgress(dir, owner, now, bytes)
	if err != nil {
		return fmt.Errorf("adding up what %s has sent: %w", ownerName(owner), err)
	}
	if day.Bytes >= may {
		return fmt.Errorf("%w: %s has sent %d MiB on %s (UTC), and may send %d a day: wait for the next day, or raise the limit with Limits.Write",
			spec.ErrQuota, ownerName(owner), day.Bytes>>20, day.Day, may>>20)
	}
	return nil
}

func addEgress(dir, owner string, now time.Time, bytes uint64) (day sent, err error) {
	l, err := openOwner(dir, owner)
	if err != nil {
		return day, err
	}
	defer l.f.Close()
	ctx, cancel := context.WithTimeout(context.Background(), egressPatience)
	defer cancel()
	if err := l.await(ctx, func() (bool, error) { return l.lock(ledgerEgress, 1) }); err != nil {
		return day, err
	}
	if day, err = readEgress(dir, owner, now); err != nil || bytes == 0 {
		return day, err
	}
	day.Bytes += bytes
	data, err := json.Marshal(day)
	if err != nil {
		return day, err
	}
	return day, osfile.WriteFile(egressPath(dir, owner), append(data, '\n'), 0o600)
}

// OwnerEgress returns how many bytes an owner's sandboxes have sent today, UTC, since the owner has a limit. What runs
// adds its bytes once a minute.
func OwnerEgress(dir, owner string, now time.Time) (uint64, error) {
	day, err := readEgress(dir, owner, now)
	if err != nil {
		return 0, fmt.Errorf("reading what %s has sent: %w", ownerName(owner), err)
	}
	return day.Bytes, nil
}
