"""What every other package stands on: errors, files, settings, chips, intervals of estimates."""
