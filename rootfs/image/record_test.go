package image

import (
	"errors"
	"os"
	"strings"
	"testing"
)

func TestWriteRecord_that_nobody_could_read_is_refused(t *testing.T) {
	img := &Image{Version: RecordVersion, ID: strings.Repeat("a", 64), Include: []string{strings.Repeat("x", maxRecordBytes)}, dir: t.TempDir()}
	if err := writeRecord(img); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	if left, err := os.ReadDir(img.dir); len(left) != 0 || err != nil {
		t.Errorf("left: %v (%v)", left, err)
	}
}
