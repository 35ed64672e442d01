"""One model on many ranks: layouts, splits, schedules, and the engines that execute them."""
