package sandbox_test

import (
	"github.com/drowse-vm/drowse/sandbox/process"
)

// Tests keep stacks very short, so that layers are merged all the time.
const maxStackOfTests = 5

func init() { process.SetStack(maxStackOfTests, 3) }
